"""Failpoints: make a fault happen at its exact point. Off unless PRELAY_FAULTS is set.

    PRELAY_FAULTS="handoff.after=die, relay.deliver=pause:0.2@*, emit=lost@3"

`point=action[:seconds][@n]`: at the n-th hit of the point (default 1, `*` at every hit) do the action:
`die` kills this process with SIGKILL, `stop` freezes it with SIGSTOP until somebody continues it, `pause` makes the
thread sleep, `cut` raises QueueUnavailable. Each script has the points
`<script>.before` and `<script>.after`, and `<script>` for `lost`: its first answer is thrown away and it is sent
again, as a client does whose connection broke after the request went out. Further points, where no script is:

    copy.before, copy.after                        around a decode worker's copy of KV blocks, before it is checked
    copy.middle                                    between its first block and its second (the real model only)
    writer.before, writer.after                    around each write of a worker's writer thread
    relay.requeue.before, relay.requeue.after      around the relay's answer to a preempt
    relay.deliver                                  before tokens enter the assembler of a stream
    batch.submit.before, batch.submit.after        around the submit of some lines of a batch
    batch.append.before, batch.append.after        around each answer that is noted in a batch's ledger
    batch.checkpoint.before, batch.checkpoint.after    around making that last
    batch.assemble.before, batch.assemble.after    around making a batch's files of results
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import signal
import threading
import time
from dataclasses import dataclass

from .errors import QueueUnavailable

log = logging.getLogger("prelay.failpoints")

_ACTIONS = ("die", "stop", "pause", "cut", "lost")
_FAULT = re.compile(rf"([\w.]+)=({'|'.join(_ACTIONS)})(?::(\d+(?:\.\d+)?))?(?:@(\*|[1-9]\d*))?")


@dataclass(slots=True)
class Fault:
    """One armed fault."""

    action: str
    seconds: float = 0.0
    at: int = 1  # 0 is every hit
    hits: int = 0

    def due(self) -> bool:
        self.hits += 1
        return self.at in (0, self.hits)


def parse(words: str) -> dict[str, Fault]:
    """Read PRELAY_FAULTS. Raise ValueError naming the part that does not parse."""
    return dict(_parse_one(part) for part in filter(None, (p.strip() for p in words.split(","))))


def _parse_one(part: str) -> tuple[str, Fault]:
    found = _FAULT.fullmatch(part)
    if found is None:
        raise ValueError(f"PRELAY_FAULTS: cannot read {part!r}; write point=action[:seconds][@n or @*], {_ACTIONS=}")
    point, action, seconds, at = found.groups()
    return point, Fault(action, float(seconds or 0), 0 if at == "*" else int(at or 1))


_lock = threading.Lock()
_armed = parse(os.environ.get("PRELAY_FAULTS", ""))


def arm(words: str) -> None:
    """Replace what is armed in this process (for tests in one process)."""
    global _armed
    _armed = parse(words)


def armed() -> bool:
    """True when any fault is armed here: calls are then sent one by one, so that each passes its points."""
    return bool(_armed)


def _due(point: str) -> Fault | None:
    if not _armed:
        return None
    with _lock:
        fault = _armed.get(point)
        return fault if fault is not None and fault.due() else None


def _strike(fault: Fault, point: str) -> None:
    log.warning("failpoint %s: %s", point, fault.action)  # a test asserts that its fault did happen
    if fault.action == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if fault.action == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    if fault.action == "cut":
        raise QueueUnavailable(f"failpoint {point}")


def hit(point: str) -> None:
    """Pass a point in a thread."""
    fault = _due(point)
    if fault is not None:
        _strike(fault, point)
        time.sleep(fault.seconds)


async def ahit(point: str) -> None:
    """Pass a point in a coroutine."""
    fault = _due(point)
    if fault is not None:
        _strike(fault, point)
        await asyncio.sleep(fault.seconds)


def loses_reply(script: str) -> bool:
    """True when this answer of `script` is to be thrown away."""
    fault = _due(script)
    if fault is None or fault.action != "lost":
        return False
    log.warning("failpoint %s: lost", script)
    return True
