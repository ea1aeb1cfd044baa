"""The state directory and the port, looked at without making, locking or taking anything."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import httpx

from ..errors import PortTaken, StateDirError
from ..host import check_port, space
from ..readiness import base_url
from ..settings import Settings
from ..statedir import check_private, holder, socket_path


@dataclass(frozen=True, slots=True)
class State:
    """A state directory. `holder` is the pid of the supervisor that has it, `server_held` whether a server has."""

    root: Path
    is_wanted: bool
    problem: str = ""
    holder: str | None = None
    server_held: bool = False
    exists: bool = False
    free: int = 0

    @property
    def is_running(self) -> bool:
        return self.holder is not None


@dataclass(frozen=True, slots=True)
class Files:
    """The folder of uploaded files and batches: whether it is there, why it cannot be used, and bytes that are free."""

    root: Path
    problem: str = ""
    exists: bool = False
    free: int = 0


@dataclass(frozen=True, slots=True)
class Port:
    """An address to listen on: `problem` is why nobody can now, `answers` the verdict of a Prelay API that does."""

    host: str
    port: int
    problem: str = ""
    answers: str = ""
    is_ours: bool = False


def look_at_state(settings: Settings) -> State:
    root, wanted = settings.state_dir.absolute(), settings.url is None
    if not wanted:
        return State(root, wanted)
    try:
        place = nearest(root)
        problem = _problem(root, place)
        if problem or place != root:
            return State(root, wanted, problem, free=space(place)[1])
        held = holder(root / "server" / "lock") is not None if (root / "server").is_dir() else False
        return State(root, wanted, problem, holder(root / "lock"), held, True, space(root)[1])
    except OSError as error:
        return State(root, wanted, f"{error.filename or root}: {error.strerror}")


def look_at_files(root: Path) -> Files:
    try:
        place = nearest(root)
        return Files(root, not_writable(place), place == root, space(place)[1])
    except OSError as error:
        return Files(root, f"{error.filename or root}: {error.strerror}")


def nearest(root: Path) -> Path:
    """Return the directory itself, or what is there of the ones above it."""
    return next(place for place in (root, *root.parents) if os.path.lexists(place))


def not_writable(place: Path) -> str:
    """Why nothing can be made in a directory, "" when it can."""
    if not place.is_dir():
        return f"{place} is not a directory"
    if not os.access(place, os.W_OK | os.X_OK):
        return f"this user may not write {place}"
    return ""


def _problem(root: Path, place: Path) -> str:
    if problem := not_writable(place):
        return problem
    try:
        socket_path(root)
        if os.path.lexists(root / "server"):
            check_private(root / "server")
    except StateDirError as error:
        return str(error)
    return ""


def look_at_port(settings: Settings, state: State) -> Port:
    try:
        check_port(settings.host, settings.port)
    except PortTaken as error:
        answers = _who_answers(base_url(settings.host, settings.port))
        return Port(settings.host, settings.port, str(error), answers, state.is_running)
    return Port(settings.host, settings.port)


def _who_answers(url: str) -> str:
    """Return the verdict ("ready" or "not ready") of a Prelay API there, "" for anything else."""
    try:
        with httpx.Client(base_url=url, timeout=3, trust_env=False) as client:
            if client.get("/health/live").json() != {"status": "alive"}:
                return ""
            return str(client.get("/health/ready").json()["status"])
    except (httpx.HTTPError, ValueError, KeyError, TypeError):
        return ""
