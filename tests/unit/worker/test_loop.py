"""The model loop: what it holds, frees and writes, whatever the other threads say and in whatever order."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from itertools import permutations

import orjson
import pytest

from prelay_decode.worker import COPY_THREADS
from prelay_queue.job import Priority
from prelay_worker.config import Role
from prelay_worker.errors import DeviceBroken, HandoverBroken, HandoverStale
from prelay_worker.messages import Copied, Evict, Exported, Message, Release, Stop
from prelay_worker.worker import Worker
from prelay_worker.writer import Adopt, Fail, GiveUp, Handoff, Tokens, Write
from tests.bed.processes import until
from tests.unit.worker.desk import free, give, held, make_claim, make_worker, step

KEY = "r/0@1"


def held_out(blocks: int = 16) -> tuple[Worker, list[Write]]:
    """A prefill worker whose job waits for a decode worker: its hand-over is written, not answered."""
    worker, writes = make_worker(Role.PREFILL, blocks)
    worker.leases.hold("r/0", 1)
    give(worker, make_claim())
    step(worker)
    (handoff,) = writes
    assert isinstance(handoff, Handoff)
    assert free(worker) == blocks - 1
    return worker, writes


# The end of an export: every order in which its messages can come.


@pytest.mark.parametrize("order", [*permutations([Exported(KEY), Release("r/0", 1)])], ids=str)
def test_an_export_is_freed_when_it_is_both_known_and_released_in_any_order(order: tuple[Message, ...]) -> None:
    worker, _ = held_out()
    give(worker, order[0])
    assert free(worker) == 15
    give(worker, order[1])
    assert (free(worker), worker.attempts, held(worker)) == (16, {}, {})


@pytest.mark.parametrize("order", [*permutations([Exported(KEY), Release("r/0", 1), Stop("r/0", 1, "done")])], ids=str)
def test_a_stop_among_them_frees_it_once_and_leaves_no_lease(order: tuple[Message, ...]) -> None:
    worker, _ = held_out()
    for message in order:
        if isinstance(message, Exported):
            worker._hear_writer(message)  # as the writer thread says it: it changes the lease first
            give(worker)
        else:
            give(worker, message)
    assert (free(worker), worker.attempts, held(worker)) == (16, {}, {})


def test_a_hand_over_that_was_refused_frees_its_blocks() -> None:
    worker, writes = held_out()
    give(worker, Stop("r/0", 1, "fenced"))
    assert (free(worker), held(worker)) == (16, {})
    assert len(writes) == 1


def test_messages_about_another_epoch_touch_nothing() -> None:
    worker, _ = held_out()
    give(worker, Exported(KEY), Release("r/0", 2), Stop("r/0", 2, "x"), Exported("r/0@2"))
    assert free(worker) == 15
    assert list(worker.attempts) == [KEY]


def test_a_claim_of_an_attempt_that_is_held_already_sends_the_job_back_and_frees_the_blocks() -> None:
    """A job that Redis lost is submitted anew, perhaps with an epoch that this worker has begun before."""
    worker, writes = held_out()
    before = len(writes)
    give(worker, make_claim())
    assert writes[before:] == [GiveUp("r/0", 1, "lost")]
    assert free(worker) == 16
    assert held(worker) == {}


def test_an_exported_job_evicted_by_an_operator_is_given_up() -> None:
    worker, writes = held_out()
    give(worker, Exported(KEY), Evict("r/0", 0))
    assert writes[1:] == [GiveUp("r/0", 1, "admin")]
    assert free(worker) == 16


# Admission.


@pytest.mark.parametrize("role", Role)
def test_a_job_that_can_never_fit_ends_with_an_error_naming_both_sizes(role: Role) -> None:
    worker, writes = make_worker(role, blocks=4)
    worker.leases.hold("r/0", 1)
    give(worker, make_claim(prompt=10, max_tokens=7))
    (fail,) = writes
    assert isinstance(fail, Fail)
    error = orjson.loads(fail.body)
    assert (error["code"], error["status"], error["type"]) == ("context_length_exceeded", 400, "invalid_request_error")
    assert "17 tokens" in error["message"]
    assert "16" in error["message"]
    assert (worker.attempts, held(worker), free(worker)) == ({}, {}, 4)


def test_a_job_that_just_fits_is_admitted() -> None:
    worker, writes = make_worker(Role.PREFILL, blocks=4)
    give(worker, make_claim(prompt=9, max_tokens=7))
    assert list(worker.attempts) == [KEY]
    assert writes == []


def test_claims_are_admitted_in_order_and_a_large_head_is_not_overtaken() -> None:
    worker, _ = make_worker(Role.PREFILL, blocks=4)
    give(worker, make_claim("a/0", 8), make_claim("b/0", 12, max_tokens=4), make_claim("c/0", 1))
    assert list(worker.attempts) == ["a/0@1"]
    give(worker, Stop("a/0", 1, "cancelled"))
    assert list(worker.attempts) == ["b/0@1", "c/0@1"]


def test_a_waiting_claim_that_is_stopped_is_forgotten_with_its_lease() -> None:
    worker, writes = make_worker(Role.PREFILL, blocks=4)
    for job in ("a/0", "b/0"):
        worker.leases.hold(job, 1)
    give(worker, make_claim("a/0", 15, max_tokens=1), make_claim("b/0", 4), Stop("b/0", 1, "cancelled"))
    assert held(worker) == {("a/0", 1): "run"}
    give(worker, Stop("a/0", 1, "cancelled"))
    assert (worker.attempts, held(worker), writes) == ({}, {}, [])


def test_the_writer_forgets_an_attempt_that_stops_here() -> None:
    worker, _ = make_worker(Role.UNIFIED)
    give(worker, make_claim())
    give(worker, Stop("r/0", 1, "cancelled"))
    assert worker.writer.forgotten == ["r/0@1"]  # type: ignore[attr-defined]


def test_a_wish_to_evict_that_overtakes_its_claim_is_kept_for_it() -> None:
    worker, writes = make_worker(Role.UNIFIED)
    give(worker, Evict("r/0", 1))
    give(worker, make_claim())
    assert (worker.attempts, writes) == ({}, [GiveUp("r/0", 1, "admin")])
    give(worker, make_claim(epoch=2))
    assert list(worker.attempts) == ["r/0@2"]


def test_a_waiting_claim_that_an_operator_evicts_is_given_up() -> None:
    worker, writes = make_worker(Role.PREFILL, blocks=4)
    give(worker, make_claim("a/0", 15, max_tokens=1), make_claim("b/0", 4), Evict("b/0", 1))
    assert writes == [GiveUp("b/0", 1, "admin")]


@pytest.mark.parametrize("first", [True, False])
def test_a_job_that_must_run_alone_runs_alone(first: bool) -> None:
    worker, _ = make_worker(Role.UNIFIED, blocks=16)
    alone, other = make_claim("a/0", alone_until=4), make_claim("b/0")
    give(worker, *((alone, other) if first else (other, alone)))
    running = "a/0@1" if first else "b/0@1"
    assert list(worker.attempts) == [running]
    job, _, _ = running.partition("@")
    give(worker, Stop(job, 1, "done"))
    assert len(worker.attempts) == 1
    assert running not in worker.attempts


def test_a_job_that_is_past_the_step_where_it_crashed_has_company_again() -> None:
    worker, _ = make_worker(Role.UNIFIED, blocks=16)
    give(worker, make_claim("a/0", alone_until=2), make_claim("b/0"))
    for emitted in (1, 2):
        step(worker)
        give(worker)
        assert (worker.attempts["a/0@1"].emitted, list(worker.attempts)) == (emitted, ["a/0@1"])
    step(worker)
    give(worker)
    assert list(worker.attempts) == ["a/0@1", "b/0@1"]


def test_after_enough_preempts_all_remaining_blocks_are_reserved_on_the_side_that_decodes() -> None:
    for role, reserved in ((Role.PREFILL, False), (Role.DECODE, True), (Role.UNIFIED, True)):
        worker, _ = make_worker(role)
        assert worker.reserved(make_claim(preemptions=3)) is reserved
        assert worker.reserved(make_claim(preemptions=2)) is False


# Decode: copies.


def copying() -> tuple[Worker, list[Write]]:
    """A decode worker in the middle of a copy; its copy threads do nothing here."""
    worker, writes = make_worker(Role.DECODE)
    worker._copiers.submit = lambda *_: None  # type: ignore[attr-defined]
    give(worker, make_claim(ids=(7,)))
    assert worker.engine.stats().copying == 2
    return worker, writes


def test_a_complete_copy_is_adopted_and_decodes_at_the_next_step() -> None:
    worker, writes = copying()
    give(worker, Copied(KEY))
    assert writes == [Adopt("r/0", 1)]
    step(worker)
    assert [type(write) for write in writes] == [Adopt, Tokens]
    assert writes[1].seq == 1  # type: ignore[attr-defined]


def test_blocks_stay_copying_until_the_copy_has_ended_though_the_job_was_stopped() -> None:
    worker, writes = copying()
    give(worker, Stop("r/0", 1, "cancelled"))
    assert (worker.engine.stats().copying, free(worker)) == (2, 14)
    give(worker, Copied(KEY))
    assert (worker.engine.stats().copying, free(worker), writes) == (0, 16, [])


def test_a_stale_export_sends_the_job_back_to_step_one() -> None:
    worker, writes = copying()
    give(worker, Copied(KEY, HandoverStale("overwritten")))
    assert [type(write) for write in writes] == [GiveUp]
    assert free(worker) == 16


def test_a_gpu_that_is_of_no_use_any_more_ends_the_worker_and_no_job() -> None:
    worker, writes = copying()
    with pytest.raises(DeviceBroken, match="700"):
        give(worker, Copied(KEY, DeviceBroken("cudaErrorIllegalAddress (700)")))
    assert writes == []


@pytest.mark.parametrize(("failed", "error"), [(0, HandoverBroken("layout")), (7, HandoverStale("again and again"))])
def test_an_export_that_can_never_be_read_ends_the_job(failed: int, error: HandoverStale | HandoverBroken) -> None:
    worker, writes = make_worker(Role.DECODE)
    worker._copiers.submit = lambda *_: None  # type: ignore[attr-defined]
    give(worker, make_claim(ids=(7,), failed_handovers=failed))
    give(worker, Copied(KEY, error))
    (fail,) = writes
    assert isinstance(fail, Fail)
    assert orjson.loads(fail.body)["code"] == "kv_handover_failed"
    assert free(worker) == 16


def test_a_job_that_was_preempted_often_is_not_ended_by_one_failed_hand_over() -> None:
    worker, writes = make_worker(Role.DECODE)
    worker._copiers.submit = lambda *_: None  # type: ignore[attr-defined]
    give(worker, make_claim(ids=(7,), preemptions=46))
    give(worker, Copied(KEY, HandoverStale("overwritten")))
    assert [type(write) for write in writes] == [GiveUp]


# Eviction.


def test_the_lowest_class_and_then_the_latest_arrival_is_evicted_and_freed_before_it_is_given_up() -> None:
    worker, writes = make_worker(Role.UNIFIED, blocks=8, max_running=8)
    give(
        worker,
        make_claim("high/0", 7, 16, priority=Priority.INTERACTIVE, submitted_ms=3),
        make_claim("old/0", 7, 16, submitted_ms=1),
        make_claim("new/0", 7, 16, submitted_ms=2),
    )
    for _ in range(3):
        step(worker)
    assert [write.job for write in writes if isinstance(write, GiveUp)] == ["new/0"]
    assert "new/0@1" not in worker.attempts


def test_a_token_of_the_step_in_which_its_job_is_evicted_is_not_written() -> None:
    worker, writes = make_worker(Role.UNIFIED, blocks=5, max_running=8)
    give(worker, make_claim("a/0", 7, 8, submitted_ms=1), make_claim("b/0", 7, 8, submitted_ms=2))
    for _ in range(3):
        step(worker)
    given_up = next(i for i, write in enumerate(writes) if isinstance(write, GiveUp))
    assert not [write for write in writes[given_up:] if write.job == "b/0" and isinstance(write, Tokens)]
    seqs = [write.seq for write in writes if isinstance(write, Tokens) and write.job == "b/0"]
    assert seqs == list(range(len(seqs)))


def test_a_decode_worker_that_ends_finishes_the_copies_that_run_and_begins_no_others() -> None:
    worker, _ = make_worker(Role.DECODE, blocks=32)
    begun: list[str] = []
    running, go_on = threading.Barrier(COPY_THREADS + 1), threading.Event()

    def fetch(_kv: bytes, key: str, _tokens: int) -> None:
        begun.append(key)
        running.wait(30)
        assert go_on.wait(30)

    worker.backend.transport.fetch = fetch  # type: ignore[method-assign, assignment]
    # Given more jobs than copy threads
    give(worker, *(make_claim(f"r/{number}", ids=(7,)) for number in range(COPY_THREADS + 3)))
    running.wait(30)
    # When the worker ends, then it waits for those that write into its blocks, and only for them
    with ThreadPoolExecutor(1) as threads:
        ends = threads.submit(worker.close_role)
        until(lambda: worker._copiers._shutdown)  # type: ignore[attr-defined]
        assert not ends.done()
        go_on.set()
        ends.result(timeout=30)
    assert len(begun) == COPY_THREADS
