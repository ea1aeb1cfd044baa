"""What Redis loses or an operator destroys comes back by itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from prelay_queue import failpoints
from prelay_queue.client import SyncQueue
from prelay_queue.errors import QueueError
from prelay_queue.job import Priority
from prelay_queue.scripts import NAMES, Call, Emission, source
from prelay_queue.server import inspect, load_scripts
from prelay_queue.state import State
from tests.bed.servers import Server
from tests.integration.queue_desk import D1, DOMAIN, JOB, P1, P2, Desk, ServerDesk, new_job

STAGES = {State.QUEUED: "prefill", State.STAGED: f"decode:{DOMAIN}"}


def test_the_server_will_do(any_server: Server) -> None:
    info = inspect(any_server.client)
    assert info.problems() == []
    assert info.warnings() == []
    assert info.kind in ("redis", "valkey")


@pytest.mark.parametrize("name", NAMES)
def test_every_script_compiles_on_the_server(any_server: Server, name: str) -> None:
    any_server.client.script_load(source(name))


def test_a_flushed_script_cache_is_not_noticed(server_desk: ServerDesk, any_server: Server) -> None:
    desk = server_desk
    any_server.client.script_flush()
    desk.submit()
    steps: tuple[Callable[[], str], ...] = (
        lambda: desk.claim(P1).code,
        desk.handoff,
        lambda: desk.claim(D1, f"decode:{DOMAIN}").code,
        desk.adopt,
        lambda: desk.emit(1, (8,)).code,
        lambda: desk.finish(2, (9,)),
    )
    for step in steps:
        any_server.client.script_flush()
        assert step() == "ok"
    assert desk.view().ids == (7, 8, 9)


def test_a_flush_in_front_of_a_batch_of_writes_loses_and_doubles_nothing(
    server_desk: ServerDesk, any_server: Server
) -> None:
    desk = server_desk
    desk.to(State.DECODE, new_job("a/0"))
    desk.to(State.DECODE, new_job("b/0"))
    assert isinstance(desk.queue, SyncQueue)
    load_scripts(desk.queue)
    any_server.client.script_flush()
    any_server.client.script_load(source("emit"))  # one script known, the other not
    scripts = desk.scripts
    calls: list[Call[Any]] = [
        scripts.emit(D1, [Emission("a/0", 1, 3, (10,)), Emission("b/0", 1, 3, (20,))]),
        scripts.finish("a/0", 1, D1, 4, (11,), "stop"),
        scripts.emit(D1, [Emission("b/0", 1, 4, (21,))]),
        scripts.preempt("b/0", 1, D1, "kv"),
    ]
    answers = desk.queue.run_many(calls)
    assert [answer if isinstance(answer, str) else [e.code for e in answer] for answer in answers] == [
        ["ok", "ok"], "ok", ["ok"], "ok",
    ]  # fmt: skip
    assert desk.view("a/0").ids == (7, 8, 9, 10, 11)
    assert desk.view("b/0").ids == (7, 8, 9, 20, 21)
    desk.check()


@pytest.mark.parametrize("one_by_one", [False, True])
def test_what_redis_refuses_of_one_call_is_returned_in_its_place(server_desk: ServerDesk, one_by_one: bool) -> None:
    desk = server_desk
    desk.to(State.DECODE)
    desk.redis.set(desk.keys.job("bad/0"), "no hash")
    calls = [desk.scripts.preempt(job, 1, D1, "kv") for job in ("bad/0", JOB)]
    failpoints.arm("nowhere=cut" if one_by_one else "")
    try:
        refused, done = desk.queue.run_many(calls)
    finally:
        failpoints.arm("")
        desk.redis.delete(desk.keys.job("bad/0"))
    assert type(refused) is QueueError
    assert done == "ok"


@pytest.mark.parametrize("damage", ["trim", "delete", "delete entry"])
@pytest.mark.parametrize("delivered", [False, True])
def test_a_queued_job_whose_entry_is_gone_is_offered_again(desk: Desk, damage: str, delivered: bool) -> None:
    desk.to(State.QUEUED)
    if delivered:  # handed to a worker that never claims it
        desk.deliver(P1)
    stream = desk.keys.work("prefill")[3]
    _damage(desk, stream, damage)
    assert desk.reap().pushed == (JOB,)
    assert desk.reap().pushed == ()
    desk.make_groups("prefill")
    claim = desk.claim(P2).claim
    assert claim is not None
    assert claim.epoch == 1


@pytest.mark.parametrize("damage", ["trim", "delete", "delete entry"])
def test_a_staged_job_whose_entry_is_gone_is_offered_again_by_its_exporter(desk: Desk, damage: str) -> None:
    desk.to(State.STAGED)
    _damage(desk, desk.keys.work(STAGES[State.STAGED])[3], damage)
    assert desk.renew(P1, "export") == "hold"
    assert desk.renew(P1, "export") == "hold"
    desk.make_groups(STAGES[State.STAGED])
    assert desk.claim(D1, STAGES[State.STAGED]).code == "ok"


def test_a_staged_job_whose_entry_and_exporter_are_gone_starts_again(desk: Desk) -> None:
    desk.to(State.STAGED)
    _damage(desk, desk.keys.work(STAGES[State.STAGED])[3], "delete")
    assert desk.crash().reaped == (JOB,)
    assert desk.claim(P2).code == "ok"


def _damage(desk: Desk, stream: str, damage: str) -> None:
    if damage == "trim":
        desk.backend.trim(stream)
    elif damage == "delete":
        desk.backend.delete(stream)
    else:
        desk.backend.drop_entry(stream, desk.entries(stream)[0][0])


@pytest.mark.parametrize("state", STAGES)
def test_a_destroyed_group_gives_its_entries_out_again(desk: Desk, state: State) -> None:
    desk.to(state)
    stage = STAGES[state]
    first = desk.deliver(P1, stage)
    for stream in desk.keys.work(stage):
        desk.backend.drop_group(stream)
    desk.make_groups(stage)
    assert desk.deliver(P2, stage) == first
    lease_ms = 60_000
    assert desk.run(desk.scripts.claim(*first, P2, lease_ms)).code == "ok"
    assert desk.run(desk.scripts.claim(*first, P1, lease_ms)).code == "stale"


@pytest.mark.parametrize("state", [s for s in State if s is not State.DONE])
def test_every_script_survives_the_loss_of_all_work_streams(desk: Desk, state: State) -> None:
    desk.to(state)
    for stage in STAGES.values():
        desk.backend.delete(*desk.keys.work(stage))
    assert desk.cancel() == "ended"
    assert desk.view().reason == "cancelled"


def test_what_a_flush_took_is_gone_for_every_script_and_can_be_submitted_again(desk: Desk) -> None:
    desk.to(State.DECODE)
    desk.backend.lose_everything()
    assert desk.emit(3, (10,)).code == "gone"
    assert desk.renew(D1) == "lost"
    assert desk.run(desk.scripts.view(JOB)) is None
    assert desk.submit(new_job(epoch=2, ids=(7, 8, 9))) == ("new",)
    assert desk.emit(3, (10,)).code == "fenced"
    desk.make_groups("prefill")
    claim = desk.claim(P2).claim
    assert claim is not None
    assert (claim.epoch, claim.ids) == (2, (7, 8, 9))


def test_nothing_is_left_of_many_jobs_but_streams_and_their_groups(desk: Desk) -> None:
    for i in range(6):
        desk.to(State.DECODE, new_job(f"r/{i}", priority=list(Priority)[i % 3]))
    for i in range(6):
        job = f"r/{i}"
        if i % 2:
            desk.preempt(job=job)
            desk.requeue(0, job=job)
            desk.cancel(job=job)
        else:
            desk.finish(3, (10,), job=job)
    for i in range(6):
        desk.backend.forget(f"r/{i}")
    left = desk.look()
    assert {key for key in left.names() if not key.startswith("work:")} == {"domains", "apis", "drain", "restarts"}
    assert desk.waiting() == {}


def test_a_job_can_be_looked_at_on_a_full_server_and_on_a_replica(own_server: Server) -> None:
    desk = ServerDesk(own_server.settings())
    desk.to(State.DECODE)
    with desk.backend.full():
        assert desk.view().ids == (7, 8, 9)
    own_server.client.execute_command("REPLICAOF", "127.0.0.1", "1")
    assert (desk.view().state, desk.view().epoch) == ("decode", 1)
    own_server.client.execute_command("REPLICAOF", "NO", "ONE")
    assert desk.queue.run(desk.scripts.view("unknown/0")) is None
    desk.close()
