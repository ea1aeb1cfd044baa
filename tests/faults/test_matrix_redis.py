"""The failpoint matrix, Redis's axis: it is killed and started again, stands still, loses its connections, or its
replies are lost, at the moment when a worker or the API stands at a point of the protocol. Nothing is lost by that:
each client hears the right tokens to the end.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from prelay_worker.config import Role
from tests.bed.servers import Server
from tests.faults.forked import Forked
from tests.faults.matrix import (
    NULL,
    SCARCE,
    TOKENS,
    all_at_once,
    armed,
    cut_all,
    go_on,
    in_turn,
    own_server,
    points_of,
    restart,
    stand_still,
    until_struck,
)
from tests.faults.proxy import LinkProxy
from tests.faults.web import WebFleet, web_fleet

#: How long the thread at the point stands there, seconds: the fault has begun when it goes on.
HELD_S = 0.5


@contextmanager
def linked(server: Server, cut: bool) -> Iterator[LinkProxy | None]:
    """A proxy before the server, for faults of the way to it."""
    if not cut:
        yield None
        return
    socket = Path(f"{server.folder}/cut.sock")
    proxy = LinkProxy(server.socket, socket)
    try:
        yield proxy
    finally:
        proxy.close()


def lose_replies(proxy: LinkProxy) -> None:
    """Every reply is lost, with its connection, until after the point has been passed; the requests were served."""
    before = proxy.cuts
    proxy.cut = 1.0
    time.sleep(HELD_S + 0.4)  # the fault itself
    proxy.cut = 0.0
    assert proxy.cuts > before


FAULTS: dict[str, Callable[[Server], None]] = {"killed": restart, "frozen": stand_still, "cut": cut_all}


def start(fleet: WebFleet, who: str, fault: str) -> Forked:
    """A whole fleet, of which `who` has the fault; return that process."""
    api = fleet.start_api(fault if who == "api" else "")
    prefill = fleet.start(Role.PREFILL, fault if who == "prefill" else "", blocks=SCARCE)
    decode = fleet.start(Role.DECODE, fault if who == "decode" else "", blocks=SCARCE)
    return {"api": api, "prefill": prefill, "decode": decode}[who]


def run_case(who: str, point: str, fault: str, divergent: bool) -> None:
    """1 a process stands at the point, 2 Redis suffers, 3 the process goes on, 4 all ends well."""
    with (
        own_server() as server,
        linked(server, fault == "lost") as proxy,
        web_fleet(
            server, null=replace(NULL, divergent=divergent), url=proxy.url if proxy else "", refusals=True
        ) as fleet,
    ):
        held = armed(point, f"pause:{HELD_S}")
        process = start(fleet, who, held)
        fleet.ask(max_tokens=TOKENS)
        until_struck(fleet, process, held)
        lose_replies(proxy) if proxy else FAULTS[fault](server)
        go_on(fleet)
        fleet.finish()
        assert not any(one.log.count("Traceback") for one in fleet.processes), fleet.logs()


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("fault", [*FAULTS, "lost"])
@pytest.mark.parametrize("who", ["prefill", "decode", "api"])
def test_a_fault_of_redis_at_every_step_changes_no_answer(who: str, fault: str) -> None:
    all_at_once(run_case, in_turn((who, point, fault) for point in points_of(who)))


@pytest.mark.timeout(200)
def test_faults_of_redis_at_chosen_steps_change_no_answer() -> None:
    chosen = [
        ("prefill", "handoff.after", "killed"),
        ("decode", "emit.before", "lost"),
        ("decode", "preempt.after", "cut"),
        ("api", "requeue.before", "killed"),
    ]
    all_at_once(run_case, [(*case, True) for case in chosen])
