"""Fake GPUs: the CUDA runtime of cudart/fake_cudart.c, where device memory is files that several processes share."""

from __future__ import annotations

import ctypes
import fcntl
import functools
import hashlib
import os
import secrets
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from prelay_kv.cuda.runtime import Cudart

_SOURCE = Path(__file__).parent / "cudart" / "fake_cudart.c"

#: All calls are in this library's own state, so a test's settings are only its environment.
PREFIX = "FAKE_CUDART_"


@functools.cache
def library() -> Path:
    """The compiled library. Compiled once for a source, by whoever comes first; without gcc skip, in CI fail."""
    source = _SOURCE.read_bytes()
    folder = Path(tempfile.gettempdir()) / f"prelay-fake-cudart-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    path = folder / f"libfake-{hashlib.sha256(source).hexdigest()[:16]}.so"
    if path.exists():
        return path
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        if os.environ.get("CI"):
            pytest.fail("no C compiler")
        pytest.skip("no C compiler")
    part = path.with_suffix(f".{secrets.token_hex(4)}")
    flags = ["-shared", "-fPIC", "-O1", "-Wall", "-Wextra", "-Werror", "-pthread"]
    subprocess.run([compiler, *flags, str(_SOURCE), "-o", str(part)], check=True)
    part.replace(path)
    return path


class FakeGpus:
    """The devices of one folder, as a test sets them up and looks at them."""

    def __init__(self, folder: Path, environment: pytest.MonkeyPatch) -> None:
        self.folder = folder
        self.runtime = Cudart(library())
        self._environment = environment
        self._library = ctypes.CDLL(str(library()))
        self.set(dir=folder)

    def set(self, **settings: object) -> None:
        """Set FAKE_CUDART_… from now on, for this process and those that it starts; None takes one away."""
        for name, value in settings.items():
            if value is None:
                self._environment.delenv(PREFIX + name.upper(), raising=False)
            else:
                self._environment.setenv(PREFIX + name.upper(), str(value))

    @contextmanager
    def elsewhere(self, pid: int = 7) -> Iterator[None]:
        """Inside, this process has another number, so that it may open what it has exported itself."""
        before = os.environ.get(f"{PREFIX}PID")
        self.set(pid=pid)
        yield
        self.set(pid=before)

    def used(self) -> int:
        """Bytes of the current device that anybody has allocated or mapped."""
        free, total = self.runtime.memory()
        return total - free

    def spans(self) -> int:
        """Allocations and mappings of this process."""
        return int(self._library.fakeSpans())

    def pending_error(self) -> int:
        """The error that waits in this thread's state, which this asks for and so clears."""
        return int(self._library.cudaGetLastError())

    def reset(self) -> None:
        """As if this process had ended: its memory and mappings go, and an error that would stay."""
        self._library.fakeReset()

    def left(self) -> list[str]:
        """Files of the folder that some process uses; those of the dead are removed."""
        return [path.name for path in sorted(self.folder.iterdir()) if not _removed(path)]


def _removed(path: Path) -> bool:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return True
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        path.unlink(missing_ok=True)
    except BlockingIOError:
        return False
    finally:
        os.close(fd)
    return True


@contextmanager
def fake_gpus(folder: Path) -> Iterator[FakeGpus]:
    """Fake GPUs in `folder`. At the end nobody may use them any more; this process's part is wiped in any case."""
    with pytest.MonkeyPatch.context() as environment:
        for name in [name for name in os.environ if name.startswith(PREFIX)]:
            environment.delenv(name)
        gpus = FakeGpus(folder, environment)
        spans = 0
        try:
            yield gpus
            spans = gpus.spans()
        finally:
            gpus.reset()
        assert spans == 0
        assert gpus.left() == []
