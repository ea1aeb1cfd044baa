"""`prelay drain`: workers give back what they have and end, one after the other."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from ..errors import BadUsage, CliError
from .server import AdminServer
from .words import listed, plural

Worker = dict[str, Any]

#: How often it is looked whether a worker has ended, seconds.
LOOK_S = 0.3


def named(workers: Sequence[Worker], names: Sequence[str], role: str) -> list[Worker]:
    """The workers that are meant: by name, by the beginning of it, or by pid; or all of a role. Raise BadUsage."""
    if bool(names) == bool(role):
        raise BadUsage("name workers, as `prelay top` shows them, or give --role")
    if role:
        found = [worker for worker in workers if worker["role"] == role]
        if not found:
            raise BadUsage(f"--role {role}: no such worker has a heartbeat; there are {_those(workers)}")
        return found
    found = [_one(workers, name) for name in names]
    return list({worker["id"]: worker for worker in found}.values())


def _one(workers: Sequence[Worker], name: str) -> Worker:
    found = [worker for worker in workers if name in (worker["id"], str(worker.get("pid")))]
    found = found or [worker for worker in workers if worker["id"].startswith(name)]
    if len(found) == 1:
        return found[0]
    if found:
        raise BadUsage(f"{name} is the beginning of several workers: {_those(found)}")
    raise BadUsage(f"no worker {name} has a heartbeat; there are {_those(workers)}")


def _those(workers: Sequence[Worker]) -> str:
    return listed([f"{worker['id']} ({worker['role']})" for worker in workers]) or "none"


def drain(server: AdminServer, workers: Sequence[Worker], *, wait: bool, rolling: bool, timeout_s: float) -> int:
    """Drain them in turn. `wait` until each has ended; `rolling`: until another one of its role serves in its place."""
    for worker in workers:
        before = _serving(server, worker["role"])
        server.drain(worker["id"])
        print(f"{worker['id']} ({worker['role']}): asked to end", flush=True)
        if wait or rolling:
            _until(timeout_s, f"{worker['id']} has not ended", _is_gone, server, worker)
            print(f"{worker['id']}: ended", flush=True)
        if rolling:
            words = f"no {worker['role']} worker came in its place: whoever started it must start it again"
            _until(timeout_s, words, _serve, server, worker["role"], before)
            print(f"{plural(before, worker['role'] + ' worker')} ready", flush=True)
    return 0


def _is_gone(server: AdminServer, worker: Worker) -> bool:
    return all(each["id"] != worker["id"] for each in server.workers())


def _serving(server: AdminServer, role: str) -> int:
    found = [worker for worker in server.workers() if worker["role"] == role]
    return sum(worker["state"] == "ready" and not worker["stale"] for worker in found)


def _serve(server: AdminServer, role: str, many: int) -> bool:
    return _serving(server, role) >= many


def _until(timeout_s: float, words: str, what: Callable[..., bool], *of: object) -> None:
    deadline = time.monotonic() + timeout_s
    while not what(*of):
        if time.monotonic() > deadline:
            raise CliError(f"after {timeout_s:g} s {words} (--timeout)")
        time.sleep(LOOK_S)
