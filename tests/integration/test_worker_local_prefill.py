"""A decode worker that takes short prompts itself, beside prefill workers and without any."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace

import pytest

from prelay_queue.scripts import text
from prelay_queue.state import State
from prelay_worker.config import Role
from tests.bed.processes import until
from tests.bed.servers import Server
from tests.faults.fleet import NULL, Client, NullFleet, null_fleet

SHORT, LONG = 8, 9
#: Long enough to be met in the middle.
SLOW = replace(NULL, prefill_ms_per_token=200)


@pytest.fixture(params=["plain", "divergent"])
def fleet(shared_server: Server, request: pytest.FixtureRequest) -> Iterator[NullFleet]:
    with null_fleet(shared_server, null=replace(NULL, divergent=request.param == "divergent")) as found:
        yield found


def states(fleet: NullFleet, clients: list[Client]) -> set[str]:
    return {text(fleet.redis.hget(fleet.keys.job(client.id), "st") or "") for client in clients}


def computed_by(fleet: NullFleet, role: Role) -> int:
    return sum(beat["computed_tokens"] for beat in fleet.status() if beat["role"] == role)


def test_it_takes_what_is_short_and_leaves_the_rest(fleet: NullFleet) -> None:
    fleet.start(Role.DECODE, local_prefill_tokens=SHORT)
    fleet.until_ready()
    long = fleet.submit(2, prompt=LONG)
    short = fleet.submit(4, prompt=SHORT)
    until(lambda: states(fleet, short) == {State.DONE})
    assert states(fleet, long) == {State.QUEUED}
    fleet.start(Role.PREFILL)
    fleet.finish()


def test_a_pool_too_small_for_what_it_took_preempts_and_every_answer_is_right(fleet: NullFleet) -> None:
    fleet.start(Role.DECODE, blocks=14, local_prefill_tokens=64)
    fleet.until_ready()
    clients = fleet.submit(8, max_tokens=40)
    fleet.until_done()
    assert max(fleet.view(client).epoch for client in clients) > 1
    fleet.finish()


def test_an_idle_prefill_worker_comes_first(fleet: NullFleet) -> None:
    fleet.start(Role.PREFILL)
    fleet.start(Role.DECODE, local_prefill_tokens=SHORT)
    fleet.until_ready()
    for _ in range(8):
        fleet.submit(1, prompt=SHORT)
        fleet.until_done()
    until(lambda: computed_by(fleet, Role.PREFILL) + computed_by(fleet, Role.DECODE) == 8 * (SHORT + 23))
    assert computed_by(fleet, Role.PREFILL) > 4 * SHORT
    fleet.finish()


def test_a_killed_one_loses_neither_its_prefills_nor_its_answers(shared_server: Server) -> None:
    with null_fleet(shared_server, null=SLOW) as fleet:
        fleet.start(Role.DECODE, local_prefill_tokens=SHORT)
        fleet.until_ready()
        clients = fleet.submit(3, prompt=SHORT)
        until(lambda: states(fleet, clients) & {State.PREFILL, State.DECODE})
        started = time.monotonic()
        fleet.workers[0].kill()
        fleet.start(Role.DECODE, local_prefill_tokens=SHORT)
        fleet.tend()
        fleet.until_done()
        assert time.monotonic() - started < 60
        fleet.finish()
