"""Fleets of null workers in real processes: the whole protocol without a model and without an API."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from dataclasses import replace

import orjson
import pytest

from prelay_queue.job import FinishReason, Priority, Sampling
from prelay_queue.scripts import text
from prelay_worker.config import NullModel, Role, WorkerConfig
from prelay_worker.null import null_token
from tests.bed.bound import bound
from tests.bed.processes import until
from tests.bed.servers import Server
from tests.faults.fleet import NULL, Client, NullFleet, null_fleet, start_exec


@pytest.fixture
def fleet(shared_server: Server) -> Iterator[NullFleet]:
    with null_fleet(shared_server) as found:
        yield found


def state_of(fleet: NullFleet, client: Client) -> str:
    return text(fleet.redis.hget(fleet.keys.job(client.id), "st") or "")


def send(fleet: NullFleet, worker: str, op: str, client: Client, epoch: int = 0) -> None:
    fleet.redis.xadd(fleet.keys.control(worker), {"c": orjson.dumps({"op": op, "id": client.id, "ep": epoch})})


def owner_of(fleet: NullFleet, client: Client) -> str:
    return text(fleet.redis.hget(fleet.keys.job(client.id), "ow") or "")


def kept_in(fleet: NullFleet, *roles: Role) -> int:
    """Blocks in use on the workers of these roles."""
    return sum(b["kv"]["total"] - b["kv"]["free"] for b in fleet.status() if b["role"] in roles)


# The common way.


def test_prefill_and_decode_are_two_processes_and_both_touch_every_job(fleet: NullFleet) -> None:
    fleet.start(Role.PREFILL)
    fleet.start(Role.DECODE)
    fleet.until_ready()
    assert len({beat["pid"] for beat in fleet.status()} | {os.getpid()}) == 3
    clients = fleet.submit(8)
    fleet.until_done()
    decoder = next(beat["id"] for beat in fleet.status() if beat["role"] == "decode")
    assert {owner_of(fleet, client) for client in clients} == {decoder}
    fleet.finish()


def test_workers_started_by_exec_serve_and_end_well(fleet: NullFleet) -> None:
    configs = [WorkerConfig(role, fleet.settings, None, 64, null=NULL) for role in (Role.PREFILL, Role.DECODE)]
    processes = [start_exec(config) for config in configs]
    try:
        fleet.submit(4)
        fleet.until_done()
        fleet.check_answers()
    finally:
        for process in processes:
            process.send_signal(signal.SIGTERM)
        codes = [process.wait(15) for process in processes]
    assert codes == [0, 0]
    fleet.check_nothing_left()


@pytest.mark.parametrize("divergent", [False, True])
def test_a_pool_too_small_for_its_jobs_preempts_and_every_answer_is_right(
    shared_server: Server, divergent: bool
) -> None:
    with null_fleet(shared_server, null=replace(NULL, divergent=divergent)) as fleet:
        fleet.start(Role.PREFILL)
        fleet.start(Role.DECODE, blocks=20)
        fleet.until_ready()
        clients = fleet.submit(10, max_tokens=40)
        fleet.until_done()
        epochs = [fleet.view(client).epoch for client in clients]
        assert max(epochs) > 1
        # Bounded: three preempts, then a reservation.
        assert max(int(fleet.redis.hget(fleet.keys.job(c.id), "pe") or 0) for c in clients) <= 3
        fleet.finish()


@pytest.mark.parametrize("divergent", [False, True])
def test_a_unified_worker_does_both_steps_in_one_process(shared_server: Server, divergent: bool) -> None:
    with null_fleet(shared_server, null=replace(NULL, divergent=divergent)) as fleet:
        fleet.start(Role.UNIFIED, blocks=24)
        fleet.until_ready()
        fleet.submit(8, max_tokens=30)
        fleet.finish()


def test_jobs_of_a_higher_class_are_done_first(fleet: NullFleet) -> None:
    low = fleet.submit(12, priority=Priority.BATCH)
    (high,) = fleet.submit(1, priority=Priority.INTERACTIVE)
    fleet.start(Role.PREFILL, blocks=10)
    fleet.start(Role.DECODE, max_running=1)
    fleet.until_done()
    ends = {client.id: int(fleet.redis.hget(fleet.keys.job(client.id), "end") or 0) for client in (*low, high)}
    assert sum(end < ends[high.id] for end in ends.values()) <= 3  # those that were already on their way
    fleet.finish()


def test_an_eos_token_ends_a_job_early_unless_it_is_ignored(shared_server: Server) -> None:
    prompt = (5, 6, 7)
    ids: list[int] = []
    while len(ids) < 12:
        ids.append(null_token((*prompt, *ids), None, NULL.vocab_size))
    eos = ids[7]
    first = ids.index(eos)
    with null_fleet(shared_server, null=replace(NULL, eos_ids=(eos,))) as fleet:
        fleet.start(Role.PREFILL)
        fleet.start(Role.DECODE)
        stopped, ignoring = (
            fleet.submit(1, prompt_ids=prompt, sampling=Sampling(12, ignore_eos=ignore))[0] for ignore in (False, True)
        )
        fleet.until_done()
        fleet.check_answer(stopped, FinishReason.STOP)
        assert fleet.view(stopped).ids == tuple(ids[: first + 1])
        fleet.check_answer(ignoring)


# Preempts by an operator.


@pytest.mark.parametrize("divergent", [False, True])
def test_a_job_preempted_many_times_by_an_operator_still_ends_right(shared_server: Server, divergent: bool) -> None:
    with null_fleet(shared_server, null=NullModel(step_ms=15, divergent=divergent)) as fleet:
        fleet.start(Role.PREFILL)
        fleet.start(Role.DECODE)
        fleet.until_ready()
        (client,) = fleet.submit(1, max_tokens=100)
        preempted = 0

        def preempt() -> None:
            nonlocal preempted
            view = fleet.view(client)
            due = view.state == "decode" and view.epoch == preempted + 1 and len(view.ids) > 5 * preempted
            if due and preempted < 10:
                send(fleet, owner_of(fleet, client), "preempt", client, view.epoch)
                preempted += 1

        fleet.nudge = preempt
        fleet.until_done()
        assert (preempted, fleet.view(client).epoch) == (10, 11)
        fleet.finish()


def test_a_preempt_for_an_epoch_that_is_over_changes_nothing(fleet: NullFleet) -> None:
    fleet.start(Role.PREFILL)
    worker = fleet.start(Role.DECODE)
    fleet.until_ready()
    (client,) = fleet.submit(1, max_tokens=40)
    until(lambda: state_of(fleet, client) == "decode")
    send(fleet, worker.id, "preempt", client, epoch=9)
    fleet.until_done()
    assert fleet.view(client).epoch == 1
    fleet.finish()


# Cancels.


def test_a_job_cancelled_while_queued_never_runs(fleet: NullFleet) -> None:
    (client,) = fleet.submit(1)
    assert fleet.queue.run(fleet.queue.scripts.cancel(client.id, client.token)) == "ended"
    fleet.start(Role.PREFILL)
    fleet.start(Role.DECODE)
    (other,) = fleet.submit(1)
    fleet.until_done()
    fleet.check_answer(client, FinishReason.CANCELLED)
    fleet.check_answer(other)
    fleet.until_free()
    fleet.check_nothing_left()


@pytest.mark.parametrize("state", ["prefill", "staged", "adopting", "decode"])
def test_a_cancel_frees_the_blocks_in_every_phase_and_no_process_is_lost(shared_server: Server, state: str) -> None:
    null = NullModel(step_ms=5, prefill_ms_per_token=20 if state == "prefill" else 0)
    with null_fleet(shared_server, null=null) as fleet:
        fleet.start(Role.PREFILL, blocks=512)
        if state != "staged":
            faults = "copy.before=pause:1@*" if state == "adopting" else ""
            fleet.start(Role.DECODE, faults, blocks=512)
        fleet.until_ready()
        pids = [worker.pid for worker in fleet.workers]
        clients = fleet.submit(2, max_tokens=500, prompt=20)
        until(lambda: all(state_of(fleet, client) == state for client in clients[: 1 if state == "prefill" else 2]))
        roles = (Role.PREFILL,) if state in ("prefill", "staged") else (Role.DECODE,)
        until(lambda: kept_in(fleet, *roles) > 0)
        for client in clients:
            assert fleet.queue.run(fleet.queue.scripts.cancel(client.id, client.token)) == "ended"
        fleet.until_free()
        for client in clients:
            fleet.check_answer(client, FinishReason.CANCELLED)
        assert [worker.pid for worker in fleet.workers] == pids
        fleet.check_nothing_left()


def test_cancels_at_any_moment_leave_no_block_behind(fleet: NullFleet) -> None:
    fleet.start(Role.PREFILL, blocks=30)
    fleet.start(Role.DECODE, blocks=30)
    fleet.until_ready()
    for _ in range(10):
        for client in fleet.submit(4, max_tokens=30):
            is_done = bound(lambda c: state_of(fleet, c) == "done", client)
            until(bound(lambda over: fleet.chance.random() < 0.2 or over(), is_done), every_s=0.003)
            fleet.queue.run(fleet.queue.scripts.cancel(client.id, client.token))
    (last,) = fleet.submit(1)
    fleet.until_done()
    for client in fleet.clients[:-1]:
        reason = fleet.view(client).reason
        assert reason in (FinishReason.CANCELLED, FinishReason.LENGTH)
        fleet.check_answer(client, FinishReason(reason))
    fleet.check_answer(last)
    fleet.until_free()
    fleet.check_nothing_left()


# What cannot run.


@pytest.mark.parametrize("role", [Role.PREFILL, Role.DECODE])
def test_a_job_that_can_never_fit_ends_with_an_error_that_names_the_sizes(fleet: NullFleet, role: Role) -> None:
    small, large = 4, 64
    fleet.start(Role.PREFILL, blocks=small if role is Role.PREFILL else large)
    fleet.start(Role.DECODE, blocks=small if role is Role.DECODE else large)
    (client,) = fleet.submit(1, prompt=10, max_tokens=30)
    fleet.until_done()
    view = fleet.view(client)
    error = orjson.loads(view.error)
    assert (view.reason, error["code"], error["status"]) == ("error", "context_length_exceeded", 400)
    assert "40 tokens" in error["message"]
    assert "16" in error["message"]
    (fits,) = fleet.submit(1, prompt=4, max_tokens=8)
    fleet.until_done()
    fleet.check_answer(fits)
    fleet.until_free()
    fleet.check_nothing_left()


def test_a_job_past_its_deadline_ends_while_no_worker_can_take_it(fleet: NullFleet) -> None:
    fleet.start(Role.DECODE)  # it sweeps
    fleet.until_ready()
    (client,) = fleet.submit(1)
    fleet.redis.hset(fleet.keys.job(client.id), "dl", 1)
    fleet.redis.zadd(fleet.keys.deadlines, {client.id: 1})
    fleet.until_done()
    fleet.check_answer(client, FinishReason.DEADLINE)
    fleet.check_nothing_left()


# Draining.


@pytest.mark.parametrize("role", [Role.PREFILL, Role.DECODE, Role.UNIFIED])
def test_a_drained_worker_gives_its_jobs_back_and_another_ends_them(shared_server: Server, role: Role) -> None:
    with null_fleet(shared_server, null=NullModel(step_ms=10, prefill_ms_per_token=1)) as fleet:
        pair = [Role.UNIFIED] if role is Role.UNIFIED else [Role.PREFILL, Role.DECODE]
        drained = fleet.start(role)
        for other in pair:
            if other is not role:
                fleet.start(other)
        fleet.until_ready()
        clients = fleet.submit(6, max_tokens=60)
        until(lambda: any(owner_of(fleet, client) == drained.id for client in clients))
        keys = fleet.keys
        name = drained.id
        assert drained.stop() == 0
        assert not fleet.redis.exists(keys.worker(name), keys.control(name))
        assert fleet.redis.zscore(keys.workers, name) is None
        for client in clients:
            assert owner_of(fleet, client) != name or state_of(fleet, client) in ("preempted", "done")
        fleet.until_done()  # starts another in its place
        # A drain is no crash.
        assert {fleet.redis.hget(keys.job(client.id), "cr") for client in clients} == {b"0"}
        fleet.finish()


def test_a_drain_by_control_ends_the_process_with_zero(fleet: NullFleet) -> None:
    worker = fleet.start(Role.PREFILL)
    fleet.until_ready()
    fleet.redis.xadd(fleet.keys.control(worker.id), {"c": b'{"op":"drain"}'})
    until(lambda: worker.code is not None)
    assert worker.code == 0


def test_commands_that_make_no_sense_are_ignored(fleet: NullFleet) -> None:
    fleet.start(Role.PREFILL)
    decoder = fleet.start(Role.DECODE)
    fleet.until_ready()
    for raw in (b"", b"no json", b"[]", b"7", b'{"op":"stop"}', b'{"op":5,"id":[],"ep":"x"}', b'{"op":"no","id":"x"}'):
        fleet.redis.xadd(fleet.keys.control(decoder.id), {"c": raw})
        fleet.redis.xadd(fleet.keys.control(decoder.id), {"x": raw})
    fleet.submit(1)
    fleet.finish()


def test_a_worker_that_cannot_start_says_why_in_one_line_and_exits_with_one(shared_server: Server) -> None:
    with null_fleet(shared_server, url="unix:///nowhere/s.sock") as fleet:
        worker = fleet.start(Role.PREFILL)
        until(lambda: worker.code is not None)
        assert worker.code == 1
        assert worker.log.startswith("prelay prefill: Redis does not answer")
        assert "Traceback" not in worker.log
        fleet.workers.clear()
