"""From what the user calls a model to a folder on this machine."""

from __future__ import annotations

import fcntl
import hashlib
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from prelay_engine.demo import default_cache, fetch_demo
from prelay_engine.errors import DemoError

from .errors import ModelUnavailable
from .geometry import check_folder
from .report import Report, Tell

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
#: Raised when the conversion changes, so that an older folder is not taken for the new one.
GGUF_REVISION = 1
#: What is fetched of a hub repository: no pickles, no other framework's weights.
_HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "tokenizer*", "*.model"]


def served_name(value: str | None, folder: Path) -> str:
    """Return the name that clients ask for when nobody chose one."""
    if value and value.endswith(".gguf"):
        return Path(value).stem
    if value and _is_hub_id(value):
        return value
    return folder.name


def resolve_model(value: str | None, progress: Tell) -> Path:
    """Return the folder of a model: a folder, a .gguf file (converted once into the cache), a hub id, or the demo.

    `progress` is told (what is being done, share done 0…1). Raise ModelUnavailable with one line.
    """
    if value is None:
        return _demo(progress)
    path = Path(value).expanduser()
    if path.is_dir():
        check_folder(path, with_weights=False)
        return path.absolute()
    if value.endswith(".gguf"):
        return _convert(path, progress)
    if _is_hub_id(value):
        return _from_hub(value, progress)
    raise ModelUnavailable(f"--model {value}: no such folder or .gguf file, and not a hub id (ORGANISATION/NAME)")


def resolve_with_progress(value: str | None) -> Path:
    with Report().progress() as tell:
        return resolve_model(value, tell)


def fetch_demo_model() -> Path:
    return resolve_with_progress(None)


def _is_hub_id(value: str) -> bool:
    return _HUB_ID.fullmatch(value) is not None and not Path(value).exists()


def _demo(progress: Tell) -> Path:
    try:
        return fetch_demo(default_cache(), progress)
    except DemoError as error:
        raise ModelUnavailable(f"the demo model: {error}") from None


def _convert(gguf: Path, progress: Tell) -> Path:
    """Convert a file once. The folder is complete or absent; concurrent callers wait for the first."""
    try:
        found = gguf.stat()
    except OSError as error:
        raise ModelUnavailable(f"--model {gguf}: {error.strerror}") from None
    # The path, size and time stand for the content: hashing gigabytes at each start would not pay.
    mark = f"{gguf.absolute()}\n{found.st_size}\n{found.st_mtime_ns}"
    name = f"{gguf.stem}-{hashlib.blake2b(mark.encode(), digest_size=6).hexdigest()}"
    folder = default_cache() / f"gguf-{GGUF_REVISION}" / name
    if folder.is_dir():
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with (folder.parent / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not folder.is_dir():
                _convert_into(gguf, folder, progress)
    except OSError as error:
        raise ModelUnavailable(f"cannot write the model cache {folder.parent}: {error.strerror or error}") from None
    return folder


def _convert_into(gguf: Path, folder: Path, progress: Tell) -> None:
    progress("converting", 0.0)
    with tempfile.TemporaryDirectory(prefix="making-", dir=folder.parent) as scratch:
        made = Path(scratch) / "model"
        made.mkdir()
        command = [sys.executable, "-m", "prelay_engine.convert", str(gguf.absolute()), str(made)]
        done = subprocess.run(command, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)
        if done.returncode:
            lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
            raise ModelUnavailable(f"cannot convert {gguf}: {lines[-1]}")
        made.rename(folder)  # the last act: whoever sees the folder sees all of it
    progress("converting", 1.0)


def _from_hub(name: str, progress: Tell) -> Path:
    from huggingface_hub import snapshot_download

    progress(f"fetching {name}", 0.0)
    try:
        folder = Path(snapshot_download(name, allow_patterns=_HUB_FILES, etag_timeout=10))
    except Exception as error:  # a dozen classes from three libraries; to the user they are one
        why = str(error).strip().splitlines() or [type(error).__name__]
        raise ModelUnavailable(
            f"--model {name}: no such folder here, and the hub does not give it ({why[0].strip()})"
        ) from None
    check_folder(folder, with_weights=True)
    progress(f"fetching {name}", 1.0)
    return folder
