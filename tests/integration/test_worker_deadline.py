"""Deadlines in fleets of null workers: whatever a job is doing, it ends once, and its KV is free soon after."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace

import pytest

from prelay_queue.job import FinishReason, JobSpec, Sampling
from prelay_queue.scripts import NewJob, text
from prelay_worker.config import NullModel, Role
from tests.bed.processes import until
from tests.bed.servers import Server
from tests.faults.fleet import TIMES, Client, NullFleet, null_fleet

#: Leases and graces are far away, so that nothing but the deadline can end a job or free its KV.
PATIENT = replace(
    TIMES, lease_ms=60_000, preempt_grace_ms=60_000, pending_idle_ms=60_000, queued_check_ms=60_000, stranded_ms=60_000
)
#: A job would run for a minute and more.
LONG = 10_000
#: A job is over, and its KV free, so soon after its deadline.
SOON_S = 1.0


@pytest.fixture
def fleet(shared_server: Server) -> Iterator[NullFleet]:
    with null_fleet(shared_server, times=PATIENT, null=NullModel(step_ms=5), relay=False) as found:
        yield found


def submit(fleet: NullFleet, count: int = 1, ttl_s: float = 1.0, prompt: int = 20) -> list[Client]:
    clients: list[Client] = []
    for n in range(len(fleet.clients), len(fleet.clients) + count):
        spec = JobSpec(f"r{n}/0", tuple(range(n, n + prompt)), Sampling(LONG, ignore_eos=True))
        clients.append(Client(NewJob(spec, f"api:t#{n}", ends_at=time.monotonic() + ttl_s)))
    fleet.queue.run(fleet.queue.scripts.submit([client.job for client in clients]))
    fleet.clients.extend(clients)
    return clients


def brought(fleet: NullFleet, state: str, count: int = 1) -> list[Client]:
    """Jobs that come to a state before their deadlines; on a busy machine the first may be too late for that."""

    def states() -> set[str]:
        return {state_of(fleet, client) for client in fleet.clients[-count:]}

    for ttl_s in (1.0, 3.0, 9.0):
        clients = submit(fleet, count, ttl_s)
        until(lambda: states() == {state} or "done" in states())
        if states() == {state}:
            return clients
    raise AssertionError(f"no job came to {state}: {fleet.logs()}")


def state_of(fleet: NullFleet, client: Client) -> str:
    return text(fleet.redis.hget(fleet.keys.job(client.id), "st") or "")


def end_of(fleet: NullFleet, client: Client) -> int:
    """How long after its deadline a job ended, ms."""
    dl, end = (int(text(value)) for value in fleet.redis.hmget(fleet.keys.job(client.id), "dl", "end"))
    return end - dl


def check_ended(fleet: NullFleet, held_s: float = 0.0) -> None:
    """All ended by their deadlines, not before and not much later; all blocks are free; nothing is left.

    `held_s`: the test holds a worker up for so long after the deadline.
    """
    clients = fleet.clients
    until(lambda: all(state_of(fleet, client) == "done" for client in clients), 20)
    for client in clients:
        fleet.check_answer(client, FinishReason.DEADLINE)
        assert 0 <= end_of(fleet, client) <= SOON_S * 1000
    fleet.until_free(SOON_S + held_s)
    assert not fleet.redis.exists(fleet.keys.deadlines)
    fleet.check_nothing_left()


# In every state.


def test_a_job_that_nobody_takes_ends_by_its_deadline(fleet: NullFleet) -> None:
    fleet.start(Role.DECODE)  # it looks for late jobs, and takes none of these
    fleet.until_ready()
    submit(fleet, 2)
    check_ended(fleet)


def test_a_job_in_a_long_prefill_ends_by_its_deadline_and_its_kv_is_free_after_the_step(shared_server: Server) -> None:
    """The step lasts longer than the deadline: the job ends meanwhile, the blocks are free when the step has ended."""
    with null_fleet(shared_server, times=PATIENT, null=NullModel(step_ms=5, prefill_ms_per_token=150)) as fleet:
        fleet.start(Role.PREFILL, blocks=4096)
        fleet.start(Role.DECODE)
        fleet.until_ready()
        brought(fleet, "prefill")
        check_ended(fleet, held_s=3)


def test_a_staged_job_ends_by_its_deadline_and_its_exporter_frees_the_kv(fleet: NullFleet) -> None:
    fleet.start(Role.PREFILL, blocks=4096)
    fleet.until_ready()
    brought(fleet, "staged", 2)
    check_ended(fleet)


def test_a_job_that_is_being_copied_ends_by_its_deadline_on_both_sides(fleet: NullFleet) -> None:
    fleet.start(Role.PREFILL, blocks=4096)
    fleet.start(Role.DECODE, "copy.before=pause:2@*", blocks=4096)
    fleet.until_ready()
    brought(fleet, "adopting")
    check_ended(fleet, held_s=2)


@pytest.mark.parametrize("roles", [(Role.PREFILL, Role.DECODE), (Role.UNIFIED,)], ids=["pair", "unified"])
def test_a_running_answer_ends_by_its_deadline_with_what_it_has(fleet: NullFleet, roles: tuple[Role, ...]) -> None:
    for role in roles:
        fleet.start(role, blocks=4096)
    fleet.until_ready()
    clients = brought(fleet, "decode", 3)
    check_ended(fleet)
    assert all(fleet.view(client).ids for client in clients)


def test_a_preempted_job_that_no_relay_answers_ends_by_its_deadline(fleet: NullFleet) -> None:
    fleet.start(Role.UNIFIED, blocks=4096)
    fleet.until_ready()
    (client,) = submit(fleet, ttl_s=3)
    until(lambda: state_of(fleet, client) == "decode")
    fleet.queue.run(fleet.queue.scripts.evict(client.id))
    until(lambda: state_of(fleet, client) == "preempted")
    check_ended(fleet)
    assert fleet.view(client).epoch == 1


def test_neighbours_of_a_late_job_run_on(fleet: NullFleet) -> None:
    fleet.start(Role.PREFILL, blocks=4096)
    fleet.start(Role.DECODE, blocks=4096)
    fleet.until_ready()
    (late,) = submit(fleet, ttl_s=0.8)
    others = fleet.submit(3, max_tokens=300)
    fleet.until_done()
    fleet.check_answer(late, FinishReason.DEADLINE)
    for client in others:
        fleet.check_answer(client)
    fleet.check_nothing_left()


# At every point between two scripts: the worker is held up there until the deadline has passed.


@pytest.mark.parametrize(
    ("role", "point"),
    [
        (Role.PREFILL, "claim.after"),
        (Role.PREFILL, "handoff.before"),
        (Role.PREFILL, "handoff.after"),
        (Role.DECODE, "claim.after"),
        (Role.DECODE, "copy.after"),
        (Role.DECODE, "adopt.before"),
        (Role.DECODE, "adopt.after"),
        (Role.DECODE, "emit.before"),
        (Role.DECODE, "finish.before"),
    ],
)
def test_a_deadline_that_passes_between_two_scripts_ends_the_job_once(fleet: NullFleet, role: Role, point: str) -> None:
    for each in (Role.PREFILL, Role.DECODE):
        fleet.start(each, f"{point}=pause:1.5" if each is role else "", blocks=4096)
    fleet.until_ready()
    submit(fleet, ttl_s=0.7)
    check_ended(fleet, held_s=1.5)


# When those who should act are dead: leases and graces of this fleet last a minute.


@pytest.mark.parametrize(
    ("role", "point"),
    [(Role.PREFILL, "claim.after"), (Role.PREFILL, "handoff.after"), (Role.DECODE, "copy.before")],
)
def test_a_job_whose_owner_died_ends_by_its_deadline_and_nobody_keeps_its_kv(
    fleet: NullFleet, role: Role, point: str
) -> None:
    """A decode worker that dies while it copies leaves the KV with its exporter, which is no owner."""
    fleet.start(Role.PREFILL, f"{point}=die" if role is Role.PREFILL else "", blocks=4096)
    if role is Role.DECODE:
        fleet.start(role, f"{point}=die", blocks=4096)
    fleet.until_ready()
    (client,) = submit(fleet, ttl_s=3)
    until(lambda: any(worker.code is not None for worker in fleet.workers))
    assert state_of(fleet, client) == {"claim.after": "prefill", "handoff.after": "staged"}.get(point, "adopting")
    fleet.start(Role.UNIFIED)  # takes nothing of this, and looks for what is late
    check_ended(fleet)
