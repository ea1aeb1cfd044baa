"""What a rehearsal has in the place of a card: the CUDA runtime of the tests, and device memory in a folder."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from .folders import ROOT

_SOURCE = ROOT / "tests" / "bed" / "cudart" / "fake_cudart.c"


@contextmanager
def fake_card() -> Iterator[dict[str, str]]:
    """The environment of processes that compute on this CPU and share what they take for a card's memory."""
    with tempfile.TemporaryDirectory(prefix="gpu-check-card-") as folder:
        yield {
            "PRELAY_CUDART": str(_library()),
            "FAKE_CUDART_DIR": folder,
            "TRITON_INTERPRET": "1",
            "CUDA_VISIBLE_DEVICES": "",
            "OMP_WAIT_POLICY": "passive",
            "OMP_NUM_THREADS": "1",
        }


def _library() -> Path:
    """Compiled once for a source."""
    folder = Path(tempfile.gettempdir()) / f"prelay-gpu-check-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    path = folder / f"libfake-{hashlib.sha256(_SOURCE.read_bytes()).hexdigest()[:16]}.so"
    if not path.exists():
        compiler = shutil.which("gcc") or shutil.which("cc")
        if compiler is None:
            raise FileNotFoundError("a rehearsal needs a C compiler")
        part = path.with_suffix(f".{os.getpid()}")
        flags = ["-shared", "-fPIC", "-O1", "-pthread"]
        subprocess.run([compiler, *flags, str(_SOURCE), "-o", str(part)], check=True)
        part.replace(path)
    return path
