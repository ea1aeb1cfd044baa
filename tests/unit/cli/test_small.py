"""The supervisor stays small: it lives beside the workers and must not hold what only they need."""

from __future__ import annotations

import subprocess
import sys


def test_the_supervisor_imports_neither_torch_nor_the_api() -> None:
    code = "import sys, prelay.serve, prelay.doctor, prelay.chat, prelay.roles\n"
    code += "print([m for m in ('torch', 'transformers', 'fastapi', 'uvicorn') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
