"""Errors of the command line. Each becomes one line on stderr and an exit code, never a traceback.

CliError                  exit code 1
├── BadUsage              an option, variable or file that cannot be used; exit code 2
├── StateDirError         the state directory is in use, unsafe or cannot be written
├── ServerError           no fit Redis-compatible server: none found, too old, does not start or does not answer
├── ModelUnavailable      the model cannot be found, fetched or read
├── TooSmall              memory or /dev/shm does not hold what was asked for; names the size needed
├── Refused               a server refused a request; its own words, and the status
├── PortTaken             the address cannot be listened on
├── ChildFailed           a supervised process keeps failing; carries its last lines
└── NurseryUnavailable    a worker cannot be forked; it is started as a plain process instead
"""

from __future__ import annotations

from collections.abc import Sequence


class CliError(Exception):
    """The command could not do what was asked."""

    exit_code = 1


class BadUsage(CliError):  # noqa: N818 - reads as the fact it states
    """An option, variable or file cannot be used."""

    exit_code = 2


class StateDirError(CliError):
    """The state directory cannot be used."""


class ServerError(CliError):
    """There is no fit Redis-compatible server."""


class ModelUnavailable(CliError):  # noqa: N818
    """The model cannot be found, fetched or read."""


class TooSmall(CliError):  # noqa: N818
    """Memory or /dev/shm is too small; `where` says which."""

    def __init__(self, message: str, where: str) -> None:
        super().__init__(message)
        self.where = where


class Refused(CliError):  # noqa: N818
    """A server refused a request; `status` is that of HTTP."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


class PortTaken(CliError):  # noqa: N818
    """The address cannot be listened on."""


class ChildFailed(CliError):  # noqa: N818
    """A supervised process keeps failing."""

    def __init__(self, message: str, tail: Sequence[str] = ()) -> None:
        super().__init__(message + _quoted(tail))


class NurseryUnavailable(CliError):  # noqa: N818
    """A worker cannot be forked."""


def _quoted(tail: Sequence[str]) -> str:
    """A child's own one-line verdict stays on the line; anything else follows below, as it was printed."""
    if not tail:
        return ""
    if tail[-1].startswith("prelay"):
        return f": {tail[-1]}"
    return "; its last lines:" + "".join(f"\n    {line}" for line in tail)
