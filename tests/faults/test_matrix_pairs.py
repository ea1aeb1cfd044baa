"""The failpoint matrix, two faults at a time: those that could hide each other."""

from __future__ import annotations

import shutil
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product

import pytest

from prelay_worker.config import Role
from tests.bed.processes import until
from tests.bed.servers import Server, binary_of, running
from tests.faults.matrix import (
    NULL,
    SCARCE,
    TOKENS,
    all_at_once,
    armed,
    go_on,
    in_turn,
    own_server,
    press,
    until_struck,
)
from tests.faults.traffic import End, Shape
from tests.faults.web import WEB_TIMES, web_fleet


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    for found in running("redis" if binary_of("redis") else "valkey"):
        found.client.config_set("appendfsync", "everysec")
        yield found


# The API and a decode worker, prefill and decode: both die.

API_POINTS = ("submit.after", "relay.deliver", "relay.requeue.before", "requeue.after", "relay.requeue.after")
DECODE_POINTS = ("claim.after", "adopt.before", "emit.after", "preempt.before", "preempt.after", "finish.before")
PREFILL_POINTS = ("claim.after", "handoff.before", "handoff.after")


def both(nudges: tuple[Callable[[], None], Callable[[], None]]) -> None:
    for nudge in nudges:
        nudge()


def run_api_and_decode(server: Server, api_point: str, decode_point: str, divergent: bool) -> None:
    with web_fleet(server, null=replace(NULL, divergent=divergent)) as fleet:
        api = fleet.start_api(armed(api_point, "die"))
        fleet.start_api()
        fleet.start(Role.PREFILL, blocks=256)
        decode = fleet.start(Role.DECODE, armed(decode_point, "die"), blocks=SCARCE)
        fleet.ask(max_tokens=TOKENS)
        nudges = press(fleet, api, api_point), press(fleet, decode, decode_point)
        fleet.nudge = lambda: both(nudges)
        fleet.wait(lambda: api.struck(api_point) and decode.struck(decode_point))
        fleet.nudge = lambda: None
        go_on(fleet)
        fleet.finish()
        assert {api, decode} <= set(fleet.ended)


def run_both_stages(server: Server, prefill_point: str, decode_point: str, divergent: bool) -> None:
    with web_fleet(server, null=replace(NULL, divergent=divergent)) as fleet:
        fleet.start_api()
        prefill = fleet.start(Role.PREFILL, armed(prefill_point, "die"))
        decode = fleet.start(Role.DECODE, armed(decode_point, "die"), blocks=SCARCE)
        fleet.ask(max_tokens=TOKENS)
        fleet.nudge = press(fleet, decode, decode_point)
        fleet.wait(lambda: prefill.struck(prefill_point) and decode.struck(decode_point))
        fleet.nudge = lambda: None
        go_on(fleet)
        fleet.finish()
        assert {prefill, decode} <= set(fleet.ended)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_an_api_process_and_a_decode_worker_dying_change_no_answer(server: Server) -> None:
    all_at_once(run_api_and_decode, in_turn((server, one, other) for other, one in product(DECODE_POINTS, API_POINTS)))


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_both_stages_dying_change_no_answer(server: Server) -> None:
    all_at_once(run_both_stages, in_turn((server, one, other) for other, one in product(DECODE_POINTS, PREFILL_POINTS)))


@pytest.mark.timeout(200)
def test_chosen_pairs_of_deaths_change_no_answer(server: Server) -> None:
    all_at_once(run_api_and_decode, [(server, "relay.requeue.before", "preempt.after", True)])
    all_at_once(run_both_stages, [(server, "handoff.after", "adopt.before", True)])


# Redis forgets everything while an API process stands at a point, and then goes on or dies.

LOSS_POINTS = (
    "submit.before", "submit.after", "view.after", "relay.deliver", "requeue.before", "requeue.after",
    "relay.requeue.before", "relay.requeue.after", "cancel.before", "cancel.after", "reap.before",
)  # fmt: skip


def forget(server: Server, how: str) -> None:
    """Lose all data: flushed, or started again without what was on its disk."""
    if how == "flushed":
        server.client.flushall()
        return
    server.kill()
    for kept in server.folder.glob("appendonly*"):
        shutil.rmtree(kept)
    server.start()


def run_loss(how: str, point: str, then: str, divergent: bool) -> None:
    """What lives submits again all that its clients wait for, from what they have; so no answer ends early."""
    null = replace(NULL, divergent=divergent)
    with own_server() as server, web_fleet(server, null=null, lossy=True, refusals=True) as fleet:
        stopped = fleet.start_api(armed(point, "stop"))
        fleet.start_api()
        fleet.start(Role.PREFILL, blocks=256)
        fleet.start(Role.DECODE, blocks=SCARCE)
        traffic = fleet.ask(max_tokens=TOKENS)
        until_struck(fleet, stopped, armed(point, "stop"), tend=False)
        until(lambda: stopped.frozen)
        forget(server, how)
        stopped.send(signal.SIGKILL if then == "dies" else signal.SIGCONT)
        go_on(fleet)
        fleet.finish()
        assert not any(ask.end is End.FAILED for ask in traffic.asks)


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("then", ["goes on", "dies"])
def test_a_redis_that_forgets_and_an_api_process_that_stands_or_dies_change_no_answer(then: str) -> None:
    pairs = product(("flushed", "wiped"), LOSS_POINTS)
    all_at_once(run_loss, in_turn((how, point, then) for how, point in pairs))


@pytest.mark.timeout(200)
def test_a_redis_that_forgets_at_chosen_steps_of_the_api_changes_no_answer() -> None:
    all_at_once(
        run_loss, [("flushed", "relay.requeue.before", "goes on", True), ("wiped", "submit.after", "dies", True)]
    )


# Redis goes back to an older state while decode workers still write.

ROLLBACK_POINTS = {
    "decode": ("claim.after", "adopt.before", "adopt.after", "emit.before", "emit.after", "preempt.before",
               "preempt.after", "finish.before", "finish.after"),
    "api": ("submit.before", "submit.after", "requeue.before", "requeue.after"),
}  # fmt: skip


def keep_copy(server: Server) -> None:
    """Copy what is on the disk: every write of a moment ago, since each is synced before it is answered."""
    shutil.copytree(server.folder / "appendonlydir", server.folder / "older")


def go_back(server: Server) -> None:
    """Start again from the copy, as after a failover to a replica that lacked the last writes."""
    server.kill()
    shutil.rmtree(server.folder / "appendonlydir")
    (server.folder / "older").rename(server.folder / "appendonlydir")
    server.start()


def run_rollback(who: str, point: str, divergent: bool) -> None:
    """1 a copy is made at the point, 2 the work goes on for a while, 3 Redis is what it was at the copy.

    Where the answers of two attempts differ, one that went on beyond the copy may have to end with `diverged`; its
    client never hears a contradiction. In plain mode there is none, and each ends well.
    """
    null = replace(NULL, divergent=divergent)
    with own_server() as server, web_fleet(server, null=null, lossy=True, refusals=True, diverging=divergent) as fleet:
        fault = armed(point, "pause:0.3")
        api = fleet.start_api(fault if who == "api" else "")
        fleet.start(Role.PREFILL, blocks=256)
        decode = fleet.start(Role.DECODE, fault if who == "decode" else "", blocks=SCARCE)
        fleet.ask(max_tokens=TOKENS)
        until_struck(fleet, api if who == "api" else decode, fault)
        keep_copy(server)
        frames = fleet.frames_heard()
        fleet.wait(lambda: fleet.frames_heard() > frames + 60)
        go_back(server)
        go_on(fleet)
        fleet.finish()


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("divergent", [False, True], ids=["plain", "divergent"])
def test_a_redis_that_goes_back_in_time_under_writing_workers_contradicts_no_client(divergent: bool) -> None:
    points = [(who, point) for who, points in ROLLBACK_POINTS.items() for point in points]
    all_at_once(run_rollback, [(who, point, divergent) for who, point in points])


@pytest.mark.timeout(200)
def test_a_redis_that_goes_back_in_time_at_chosen_steps_contradicts_no_client() -> None:
    all_at_once(run_rollback, [("decode", "emit.after", True), ("decode", "preempt.after", False)])


# An API process dies for good.


@pytest.mark.slow
def test_an_answer_whose_only_api_process_is_gone_ends_after_the_grace_and_frees_its_blocks(server: Server) -> None:
    times = replace(WEB_TIMES, api_grace_ms=7_000)
    with web_fleet(server, times=times, null=replace(NULL, step_ms=20)) as fleet:
        doomed = fleet.start_api()
        fleet.wait(lambda: doomed.id)
        fleet.start(Role.PREFILL, blocks=1024)
        fleet.start(Role.DECODE, blocks=1024)
        traffic = fleet.ask(width=4, max_tokens=1_500, shapes=[Shape.STREAM])
        fleet.wait(lambda: len(traffic.asks) == 4)
        traffic.stop()
        fleet.wait(lambda: sum(len(ask.heard.frames) > 5 for ask in traffic.asks) == 4)
        doomed.kill()
        killed = time.monotonic()
        fleet.finish()
        assert time.monotonic() - killed < 25  # 30 s are left of each answer
        logs = [fleet.read(f"{ask.id}/0") for ask in traffic.asks]
        assert [log and log.reason for log in logs] == ["cancelled"] * 4
