"""What computes on a GPU, as installed: torch, Triton, and what Triton compiles with. Nothing of it is imported."""

from __future__ import annotations

import os
import re
import shutil
import sysconfig
from dataclasses import dataclass
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

from .places import nearest, not_writable

#: What torch's own file says of its CUDA: `cuda: Optional[str] = '13.0'`, or None.
_CUDA = re.compile(r"^cuda\b[^=\n]*=\s*(?:'([^']*)'|\"([^\"]*)\"|None)", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class TorchBuild:
    """torch's version, and the CUDA that it was built with: "" for none, None where its files do not say."""

    version: str
    cuda: str | None


@dataclass(frozen=True, slots=True)
class Triton:
    """Its version, and what it needs where kernels are first used: a C compiler ("" where there is none), Python's
    headers in `headers` if `has_headers`, and the folder `cache`, with the `problem` of that."""

    version: str
    compiler: str
    headers: Path
    has_headers: bool
    cache: Path
    problem: str = ""


def look_at_torch() -> TorchBuild:
    spec = find_spec("torch")  # of the package itself: finding it runs none of its code
    place = Path(spec.origin).with_name("version.py") if spec and spec.origin else None
    try:
        found = _CUDA.search(place.read_text(encoding="utf-8")) if place else None
    except (OSError, UnicodeDecodeError):
        found = None
    return TorchBuild(_version("torch"), (found[1] or found[2] or "") if found else None)


def look_at_triton() -> Triton:
    headers = Path(_include_folder())
    cache = _cache()
    return Triton(_version("triton"), _compiler(), headers, (headers / "Python.h").is_file(), cache, _problem_of(cache))


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "of unknown version"


def _compiler() -> str:
    """As Triton chooses it."""
    if (named := os.environ.get("CC")) is not None:
        return shutil.which(named) or ""
    return shutil.which("gcc") or shutil.which("clang") or ""


def _include_folder() -> str:
    """Where Triton looks for Python.h: not in Debian's local scheme, which has none."""
    scheme = sysconfig.get_default_scheme()
    return sysconfig.get_paths("posix_prefix" if scheme == "posix_local" else scheme)["include"]


def _cache() -> Path:
    if given := os.environ.get("TRITON_CACHE_DIR"):
        return Path(given).absolute()
    return Path(os.environ.get("TRITON_HOME") or Path.home()).absolute() / ".triton" / "cache"


def _problem_of(cache: Path) -> str:
    """Why no program can be kept in this folder and loaded from it, "" when one can."""
    try:
        place = nearest(cache)
        if problem := not_writable(place):
            return problem
        flags = os.statvfs(place).f_flag
    except OSError as error:
        return f"{error.filename or cache}: {error.strerror}"
    return f"{place} is mounted noexec" if flags & os.ST_NOEXEC else ""
