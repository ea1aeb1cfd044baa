#!/usr/bin/env bash
# Make the virtual environment and install Prelay into it. Further arguments go to pip (--group dev).
# Reads PYTHON, VENV and TORCH_INDEX. Shows what pip does: torch is large, and silence looks like a hang.
set -euo pipefail
cd "$(dirname "$0")/.."

python=${PYTHON:-python3}
venv=${VENV:-.venv}

if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
    echo "install: $python is $("$python" --version 2>&1 || echo missing); Prelay needs Python 3.11 or newer (PYTHON=...)" >&2
    exit 1
fi
if [[ ! -x $venv/bin/python ]]; then
    echo "== making $venv with $("$python" --version)"
    if ! "$python" -m venv "$venv"; then
        rm -rf "$venv"
        echo "install: cannot make a virtual environment (Debian: apt install python3-venv)" >&2
        exit 1
    fi
fi

pip=("$venv/bin/python" -m pip --disable-pip-version-check)
# Dependency groups came with pip 25.1, and Python 3.11 brings an older one.
if ! "$venv/bin/python" -c 'import pip, sys; sys.exit(tuple(map(int, pip.__version__.split(".")[:2])) < (25, 1))'; then
    echo "== pip of $venv is old: a newer one"
    "${pip[@]}" install --upgrade "pip>=25.1"
fi

echo "== installing Prelay and what it needs (torch is the large one)"
"${pip[@]}" install ${TORCH_INDEX:+--extra-index-url "$TORCH_INDEX"} --constraint constraints.txt --editable '.[workers]' "$@"
