"""The kernels' library: compiled once for this CPU and kept in the cache, or one that came with the package."""

from __future__ import annotations

import fcntl
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from ..cpu import Cpu, this_cpu
from . import shipped

HERE = Path(__file__).parent
MAIN = "kernels.cpp"
#: Tried in this order, after $CXX.
_COMPILERS = ("g++", "clang++", "c++")
_TIMEOUT_S = 300.0


class NoKernels(Exception):  # noqa: N818 - reads as the fact it states
    """There are no native kernels here; the message is one line and says why."""


def library(cache: Path, say: Callable[[str], None]) -> Path:
    """The library for this CPU: compiled here, or else one that came with the package. Raise NoKernels.

    `say` is told before a compiler runs, which takes some ten seconds. Processes that come at once wait for the first.
    """
    try:
        return _compiled_here(cache, say)
    except NoKernels:
        if (came := shipped.library(this_cpu())) is None:
            raise
        return came


def _compiled_here(cache: Path, say: Callable[[str], None]) -> Path:
    command = compiler()
    path = place(cache, command)
    if path.exists():
        return path
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with (path.parent / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not path.exists():
                say(f"compiling kernels for this CPU with {command}, once")
                _compile(command, _flags(), path)
    except OSError as error:
        raise NoKernels(f"cannot write {path.parent}: {error.strerror}") from None
    return path


def place(cache: Path, compiler: str) -> Path:
    """Where the library lies once it is compiled. Raise NoKernels when the compiler does not run."""
    return cache / "native" / f"kernels-{_key(compiler, _flags(), this_cpu())}.so"


def expected() -> bool:
    """Whether there will be kernels: they came along, or there is a compiler; whether that works shows when it runs."""
    try:
        return bool(compiler())
    except NoKernels:
        return shipped.library(this_cpu()) is not None


def compiler() -> str:
    """The path of the C++ compiler. Raise NoKernels."""
    named = os.environ.get("CXX")
    for name in (named,) if named else _COMPILERS:
        if found := shutil.which(name):
            return found
    raise NoKernels(f"there is no C++ compiler ({named or ', '.join(_COMPILERS)}) on PATH")


def ship(folder: Path) -> list[Path]:
    """Compile the kernels into `folder` for each level of this kind of machine, to come with the package.

    Raise NoKernels.
    """
    command, made = compiler(), []
    for level in shipped.levels():
        # They run where other versions of the compiler's own libraries may be, or none.
        flags = [*_flags(level.flags), "-static-libstdc++", "-static-libgcc"]
        path = folder / f"kernels-{level.name}-{_key(command, flags, Cpu())}.so"
        _compile(command, flags, path)
        made.append(path)
    return made


def _flags(cpu: Sequence[str] = ()) -> list[str]:
    cpu = cpu or ["-mcpu=native" if platform.machine() == "aarch64" else "-march=native"]
    # A product and a sum are rounded once wherever that is one instruction: the same in all instances of a loop.
    return ["-std=c++17", "-O3", *cpu, "-ffp-contract=fast", "-shared", "-fPIC", "-pthread"]


def _key(compiler: str, flags: Sequence[str], cpu: Cpu) -> str:
    """What the result depends on: sources, compiler, flags, and the CPU that `native` among those stands for."""
    version = _run([compiler, "--version"]).stdout
    digest = hashlib.blake2b(digest_size=8)
    for part in (compiler, version, *flags, platform.machine(), cpu.vendor, *sorted(cpu.flags)):
        digest.update(part.encode() + b"\0")
    for path in sorted((*HERE.glob("*.h"), HERE / MAIN)):
        digest.update(path.read_bytes() + b"\0")
    return digest.hexdigest()


def _compile(compiler: str, flags: Sequence[str], path: Path) -> None:
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        made = Path(folder) / path.name
        _run([compiler, *flags, "-w", "-o", str(made), str(HERE / MAIN)])
        made.replace(path)


def _run(command: list[str]) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(command, check=True, capture_output=True, text=True, timeout=_TIMEOUT_S)
    except subprocess.CalledProcessError as error:
        lines = [line for line in error.stderr.splitlines() if "error" in line] or error.stderr.splitlines() or ["?"]
        raise NoKernels(f"{command[0]} failed: {lines[0]}") from None
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NoKernels(f"{command[0]} could not run: {error}") from None
