"""The cases of the failpoint matrix: which points each process passes, how to bring it there, and one run of a case."""

from __future__ import annotations

import contextlib
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

from prelay_worker.config import NullModel, Role
from tests.bed.http import post
from tests.bed.servers import Server, binary_of, make_server
from tests.faults.fleet import TIMES
from tests.faults.forked import ApiProcess, Forked
from tests.faults.web import WebFleet, web_fleet

#: Fleets that run at the same time.
AT_ONCE = 8
#: A thread that sleeps for more than a lease, while the others of its process go on.
PAUSE = f"pause:{TIMES.lease_ms / 1000 + 0.5}"
ACTIONS = {"die": "die", "freeze": "stop", "pause": PAUSE, "lost": "lost"}

_WORKER = ("finish", "preempt", "renew", "reap", "beat", "tidy")
SCRIPTS: dict[str, tuple[str, ...]] = {
    "prefill": ("claim", "handoff", *_WORKER),
    "decode": ("claim", "adopt", "emit", *_WORKER),
    "unified": ("claim", "adopt", "emit", *_WORKER),
    "api": ("submit", "attend", "view", "requeue", "cancel", "evict", "reap"),
}
#: Points that are no script.
OTHERS: dict[str, tuple[str, ...]] = {
    "prefill": ("writer.before", "writer.after"),
    "decode": ("writer.before", "writer.after", "copy.before", "copy.after"),
    "unified": ("writer.before", "writer.after"),
    "api": ("relay.deliver", "relay.requeue.before", "relay.requeue.after"),
}
#: At which hit the fault happens, where the first would find no traffic yet.
HITS = {"submit": 4, "attend": 2, "relay.deliver": 20}

NULL = NullModel(step_ms=4)
#: Tokens of an answer, and requests before a case may end.
TOKENS, ASKS = 80, 14
#: Blocks of 4 tokens: some three answers, where six clients ask.
SCARCE = 66


def points_of(who: str) -> list[str]:
    return [*(f"{script}.{when}" for script in SCRIPTS[who] for when in ("before", "after")), *OTHERS[who]]


def faults_of(who: str, action: str) -> list[str]:
    """Every fault of one kind that this process may suffer."""
    points = list(SCRIPTS[who]) if action == "lost" else points_of(who)
    return [armed(point, action) for point in points]


def armed(point: str, action: str) -> str:
    hits = {name: n for name, n in HITS.items() if point == name or point.startswith(f"{name}.")}
    return f"{point}={action}" + "".join(f"@{n}" for n in hits.values())


def point_of(fault: str) -> str:
    return fault.partition("=")[0]


def in_turn(cases: Iterable[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    """Half of the cases in plain mode and half in divergent, in turn: so each script is met in both."""
    return [(*case, n % 2 == 1) for n, case in enumerate(cases)]


def all_at_once(run: Callable[..., None], cases: Sequence[tuple[Any, ...]]) -> None:
    """Run cases side by side; the report names each that failed."""
    with ThreadPoolExecutor(AT_ONCE) as pool:
        running = {case: pool.submit(run, *case) for case in cases}
    failed = {case: one.exception() for case, one in running.items() if one.exception() is not None}
    report = "\n\n".join(f"=== {case[1:]}\n{type(error).__name__}: {error}" for case, error in failed.items())
    assert not failed, f"{len(failed)} of {len(cases)}: {[case[1:] for case in failed]}\n{report}"


# Bringing a process to a point.


def press(fleet: WebFleet, process: Forked, point: str) -> Callable[[], None]:
    """What to do again and again so that `process` passes `point` soon."""
    if isinstance(process, ApiProcess):
        return _press_api(fleet, process, point)
    # Do not wait for the pool to be full at the right time.
    return (lambda: fleet.evict(worker=process)) if point.startswith("preempt") else lambda: None


def _press_api(fleet: WebFleet, api: ApiProcess, point: str) -> Callable[[], None]:
    def lose_live_stream() -> None:
        fleet.redis.delete(fleet.keys.live(api.id))  # it looks at every log when it notices

    def preempt_by_admin() -> None:
        assert fleet.traffic is not None
        for ask in fleet.traffic.open:
            if ask.id and not api.struck(point):
                with contextlib.suppress(Exception):  # it may die of it
                    post(f"{api.url}/admin/jobs/{ask.id}/preempt", timeout=1)

    if "requeue" in point:
        return _at_times(0.1, lambda: fleet.evict(api))
    if point.startswith("view"):
        return _at_times(1.5, lose_live_stream)
    if point.startswith("evict"):
        return _at_times(0.2, preempt_by_admin)
    return lambda: None


def _at_times(every_s: float, work: Callable[[], None]) -> Callable[[], None]:
    last = 0.0

    def nudge() -> None:
        nonlocal last
        if time.monotonic() - last > every_s:
            last = time.monotonic()
            work()

    return nudge


def until_struck(fleet: WebFleet, process: Forked, fault: str, *, tend: bool = True) -> None:
    """Wait until the fault has happened to `process`. What shows first is that it has written so."""
    point = point_of(fault)
    fleet.nudge = press(fleet, process, point)
    fleet.wait(lambda: process.struck(point), tend=tend)
    fleet.nudge = lambda: None


def go_on(fleet: WebFleet, asks: int = ASKS) -> None:
    """Let the traffic run to `asks` requests in all, and at least a few more than there are."""
    traffic = fleet.traffic
    assert traffic is not None
    enough = max(asks, len(traffic.asks) + 3)
    fleet.wait(lambda: len(traffic.asks) >= enough, 60)


# One case: a fault of one process.


def run_worker_case(server: Server, role: Role, fault: str, divergent: bool) -> None:
    """1 the worker that will fail has the field to itself, 2 its fault happens, 3 the others come, 4 all ends well.

    With a unified worker come all kinds, so what it lost is shared out in a mixed fleet.
    """
    with web_fleet(server, null=replace(NULL, divergent=divergent)) as fleet:
        fleet.start_api()
        if role is Role.DECODE:
            fleet.start(Role.PREFILL)
        failing = fleet.start(role, fault, blocks=SCARCE)
        fleet.ask(max_tokens=TOKENS)
        until_struck(fleet, failing, fault)
        fleet.start(role, blocks=SCARCE)
        if role is Role.UNIFIED:
            fleet.start(Role.PREFILL, blocks=SCARCE)
        if role is not Role.DECODE:
            fleet.start(Role.DECODE, blocks=SCARCE)
        go_on(fleet)
        fleet.finish()
        if fault.endswith("die"):
            assert failing in fleet.ended


def run_api_case(server: Server, fault: str, divergent: bool) -> None:
    """One of two API processes fails; its clients' answers break off at worst, and those of the other do not."""
    with web_fleet(server, null=replace(NULL, divergent=divergent)) as fleet:
        failing = fleet.start_api(fault)
        fleet.start_api()
        fleet.start(Role.PREFILL, blocks=256)
        fleet.start(Role.DECODE, blocks=SCARCE)
        fleet.ask(max_tokens=TOKENS)
        until_struck(fleet, failing, fault)
        go_on(fleet)
        fleet.finish()
        if "=die" in fault:
            assert failing in fleet.ended


# Servers that a case may hurt.


@contextlib.contextmanager
def own_server() -> Iterator[Server]:
    folder = Path(tempfile.mkdtemp(prefix="bed-"))
    server = make_server("redis" if binary_of("redis") else "valkey", folder)
    try:
        server.start()
        yield server
    finally:
        server.close()
        shutil.rmtree(folder, ignore_errors=True)


def restart(server: Server, away_s: float = 0.3) -> None:
    server.kill()
    time.sleep(away_s)  # the fault itself
    server.start()


def stand_still(server: Server, for_s: float = 3.0) -> None:
    server.kill(signal.SIGSTOP)
    time.sleep(for_s)  # the fault itself
    server.kill(signal.SIGCONT)


def cut_all(server: Server) -> None:
    """End every connection but our own."""
    server.client.client_kill_filter(_type="normal", skipme=True)
