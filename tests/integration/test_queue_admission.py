"""Admission in the queue: what may wait is counted where it changes, and decided in the submit itself."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prelay_queue.client import SyncQueue
from prelay_queue.errors import QueueBusy
from prelay_queue.job import Priority
from prelay_queue.scripts import NewJob, Scripts
from prelay_queue.state import State
from tests.bed.servers import Server
from tests.integration.queue_backend import DoubleBackend
from tests.integration.queue_desk import JOB, P1, Desk, ServerDesk, new_job

LIMIT = {cls.value: 3 for cls in Priority}


def submit(desk: Desk, *jobs: NewJob, max_jobs: int = 0, max_tokens: int = 0) -> tuple[str, ...]:
    """Submit where only so much of each class may wait."""
    scripts = Scripts(desk.keys, dict.fromkeys(Priority, max_jobs), dict.fromkeys(Priority, max_tokens))
    return desk.run(scripts.submit(jobs))


def fill(desk: Desk, count: int, prompt: int = 4, priority: Priority = Priority.NORMAL) -> None:
    for n in range(count):
        desk.submit(new_job(f"{priority}{n}/0", range(prompt), priority=priority))


def refusal(desk: Desk, *jobs: NewJob, max_jobs: int = 0, max_tokens: int = 0) -> QueueBusy:
    before = desk.look()
    with pytest.raises(QueueBusy) as raised:
        submit(desk, *jobs, max_jobs=max_jobs, max_tokens=max_tokens)
    assert desk.look() == before, "a refused submit left something"
    return raised.value


def drained(desk: Desk, *, took_ms: float, slots: float = 1, prompt: float = 4, quiet_ms: int = 0) -> None:
    """Jobs with such prompts took so long, and so many ran at a time; the last ended a while ago."""
    now = desk.now_ms() - quiet_ms
    desk.backend.set_drain(since=now, last=now, jobs=2, ms=2 * took_ms, tokens=2 * prompt, slots=2 * slots)


# What is counted.


def test_jobs_and_prompt_tokens_that_wait_are_counted_by_class(desk: Desk) -> None:
    fill(desk, 2, prompt=5)
    fill(desk, 1, prompt=7, priority=Priority.BATCH)
    waiting = desk.look().waiting
    assert {name: value for name, value in waiting.items() if name.startswith("#")} == {
        "#jobs:normal": "2", "#tokens:normal": "10", "#jobs:batch": "1", "#tokens:batch": "7",
    }  # fmt: skip


@pytest.mark.parametrize("state", [state for state in State if state is not State.QUEUED])
def test_a_job_counts_only_while_it_is_queued(desk: Desk, state: State) -> None:
    desk.to(state)
    assert desk.look().waiting == {}


def test_a_job_that_comes_back_counts_again(desk: Desk) -> None:
    desk.to(State.DECODE)
    desk.crash()
    assert desk.look().waiting == {JOB: "normal 4", "#jobs:normal": "1", "#tokens:normal": "4"}


def test_a_job_that_is_put_back_counts_once(desk: Desk) -> None:
    desk.submit()
    desk.claim(P1, place=False)
    assert desk.look().waiting["#jobs:normal"] == "1"


def test_counts_that_were_lost_come_back_with_the_sweep(server_desk: ServerDesk) -> None:
    desk = server_desk
    fill(desk, 3)
    desk.redis.delete(desk.keys.waiting)
    desk.reap()  # which checks the whole partition
    assert desk.look().waiting["#jobs:normal"] == "3"


def test_a_queued_job_whose_hash_is_lost_stops_counting_with_the_sweep(server_desk: ServerDesk) -> None:
    desk = server_desk
    desk.checked = False
    fill(desk, 2, prompt=6)
    desk.redis.delete(desk.keys.job("normal0/0"))
    desk.reap()
    assert desk.look().waiting == {"normal1/0": "normal 6", "#jobs:normal": "1", "#tokens:normal": "6"}


# What is refused.


def test_as_many_jobs_as_may_wait_are_taken_and_no_more(desk: Desk) -> None:
    for n in range(3):
        assert submit(desk, new_job(f"r{n}/0"), max_jobs=3) == ("new",)
    busy = refusal(desk, new_job("r3/0"), max_jobs=3)
    assert (busy.cls, busy.kind, busy.waiting, busy.asked, busy.limit) == ("normal", "jobs", 3, 1, 3)
    assert "the queue is full for class normal: 3 jobs wait, 1 more were asked for, and at most 3 may wait" in str(busy)


def test_as_many_prompt_tokens_as_may_wait_are_taken_and_no_more(desk: Desk) -> None:
    assert submit(desk, new_job("a/0", range(60)), max_tokens=100) == ("new",)
    busy = refusal(desk, new_job("b/0", range(41)), max_tokens=100)
    assert (busy.kind, busy.waiting, busy.asked, busy.limit) == ("tokens", 60, 41, 100)
    assert submit(desk, new_job("b/0", range(40)), max_tokens=100) == ("new",)


def test_the_choices_of_one_request_are_taken_together_or_not_at_all(desk: Desk) -> None:
    fill(desk, 2)
    choices = [new_job(f"r/{n}") for n in range(2)]
    assert refusal(desk, *choices, max_jobs=3).asked == 2
    assert submit(desk, *choices[:1], max_jobs=3) == ("new",)


def test_classes_have_places_of_their_own(desk: Desk) -> None:
    fill(desk, 3, priority=Priority.BATCH)
    refusal(desk, new_job(priority=Priority.BATCH), max_jobs=3)
    assert submit(desk, new_job(priority=Priority.NORMAL), max_jobs=3) == ("new",)


def test_where_nothing_waits_any_request_is_taken(desk: Desk) -> None:
    assert submit(desk, *(new_job(f"r/{n}", range(50)) for n in range(4)), max_jobs=3, max_tokens=100) == ("new",) * 4
    refusal(desk, new_job("s/0"), max_jobs=3)


def test_a_place_is_free_as_soon_as_a_job_is_claimed_or_cancelled(desk: Desk) -> None:
    fill(desk, 3)
    refusal(desk, new_job(), max_jobs=3)
    desk.claim(P1)
    assert submit(desk, new_job(), max_jobs=3) == ("new",)
    refusal(desk, new_job("s/0"), max_jobs=3)
    desk.cancel(job=JOB)
    assert submit(desk, new_job("s/0"), max_jobs=3) == ("new",)


def test_a_repeat_of_a_submit_that_was_taken_is_never_refused(desk: Desk) -> None:
    """The reply was lost, and meanwhile others took the last places."""
    submit(desk, new_job(), max_jobs=3)
    fill(desk, 3)
    assert submit(desk, new_job(), max_jobs=3) == ("exists",)


def test_a_job_that_redis_lost_is_never_refused(desk: Desk) -> None:
    fill(desk, 5)
    assert submit(desk, replace(new_job(), epoch=2, ids=(7,)), max_jobs=3) == ("new",)
    refusal(desk, new_job("s/0"), max_jobs=3)


def test_restarted_jobs_may_exceed_the_limit_and_then_nothing_new_is_taken(desk: Desk) -> None:
    desk.to(State.DECODE)
    fill(desk, 3)
    desk.crash()
    assert desk.look().waiting["#jobs:normal"] == "4"
    assert refusal(desk, new_job("s/0"), max_jobs=3).waiting == 4


def test_of_many_at_the_same_moment_exactly_as_many_pass_as_have_a_place(shared_server: Server) -> None:
    """Two API processes and eight threads each at the last places."""
    settings = replace(shared_server.settings(), max_queued_jobs={"normal": 10}, max_connections=8)
    queues = [SyncQueue(settings) for _ in range(2)]
    codes: list[str] = []
    barrier = threading.Barrier(16)

    def ask(n: int) -> None:
        queue = queues[n % 2]
        barrier.wait()
        for i in range(5):
            try:
                answer = queue.run(queue.scripts.submit([new_job(f"r{n}.{i}/0")]))
                codes.extend(answer)
            except QueueBusy as busy:
                codes.append(f"busy {busy.waiting}")

    threads = [threading.Thread(target=ask, args=(n,)) for n in range(16)]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert codes.count("new") == 10
        assert codes.count("busy 10") == 70
        assert queues[0].redis.zcard(queues[0].keys.queued) == 10
    finally:
        queues[0].redis.delete(*queues[0].redis.keys(f"{queues[0].keys.prefix}*"))
        for queue in queues:
            queue.close()


# What the refused are told.


def test_while_nothing_is_known_the_refused_may_come_back_soon(desk: Desk) -> None:
    fill(desk, 3)
    assert refusal(desk, new_job(), max_jobs=3).retry_ms == 2_000


def test_while_nothing_ends_they_are_told_to_wait_as_long_as_it_lasts_already(desk: Desk) -> None:
    fill(desk, 3)
    desk.backend.set_drain(since=desk.now_ms() - 12_000)
    assert refusal(desk, new_job(), max_jobs=3).retry_ms == pytest.approx(12_000, rel=0.05)


def test_a_fleet_that_ends_nothing_any_more_is_not_taken_for_a_fast_one(desk: Desk) -> None:
    fill(desk, 3)
    drained(desk, took_ms=2_000, quiet_ms=30_000)
    assert refusal(desk, new_job(), max_jobs=3).retry_ms == pytest.approx(30_000, rel=0.05)


def test_the_refused_come_back_when_as_many_have_ended_as_they_need(desk: Desk) -> None:
    fill(desk, 10)
    drained(desk, took_ms=8_000, slots=4)  # one ends every two seconds
    assert refusal(desk, new_job("a/0"), max_jobs=8).retry_ms == pytest.approx(6_000, rel=0.05)  # 3 too many


def test_more_that_run_now_than_before_are_believed(desk: Desk) -> None:
    fill(desk, 8)
    for _ in range(4):
        desk.claim(P1)
    drained(desk, took_ms=8_000, slots=1)
    assert refusal(desk, new_job("a/0"), max_jobs=4).retry_ms == pytest.approx(2_000, rel=0.05)


def test_tokens_that_are_too_many_are_waited_for_too(desk: Desk) -> None:
    fill(desk, 10, prompt=10)
    drained(desk, took_ms=8_000, slots=4, prompt=10)  # a token every 200 ms
    assert refusal(desk, new_job("a/0", range(40)), max_tokens=100).retry_ms == pytest.approx(8_000, rel=0.05)


def test_each_that_is_refused_is_sent_behind_those_refused_before(desk: Desk) -> None:
    fill(desk, 10)
    drained(desk, took_ms=20_000, slots=4)
    told = [refusal(desk, new_job(f"r{n}/0"), max_jobs=10).retry_ms for n in range(6)]
    assert told == pytest.approx([5_000, 10_000, 15_000, 20_000, 25_000, 30_000], rel=0.1)
    assert sorted(told) == told


def test_who_is_refused_again_and_again_does_not_push_others_out_of_sight(desk: Desk) -> None:
    fill(desk, 4)
    drained(desk, took_ms=2_000, slots=4)
    told = [refusal(desk, new_job("r/0"), max_jobs=4).retry_ms for n in range(60)]
    assert max(told) <= 10 * 4 * 500
    assert max(told) > 10_000


def test_more_urgent_classes_are_served_before(desk: Desk) -> None:
    fill(desk, 4, priority=Priority.INTERACTIVE)
    fill(desk, 4, priority=Priority.BATCH)
    drained(desk, took_ms=4_000, slots=4)
    busy = refusal(desk, new_job(priority=Priority.BATCH), max_jobs=4)
    assert busy.retry_ms == pytest.approx(1_000 + 4_000, rel=0.05)


def test_the_end_of_a_job_is_measured_while_others_wait(desk: Desk) -> None:
    fill(desk, 4, prompt=6)
    for _ in range(2):
        desk.claim(P1)
    desk.backend.set_drain(since=desk.now_ms() - 5_000)
    desk.finish(0, owner=P1, job="normal0/0")
    drain = desk.look().drain
    assert (drain["jobs"], drain["tokens"], drain["slots"]) == (1, 6, 2)
    assert 0 <= drain["ms"] < 30_000


@pytest.mark.parametrize("waiting", [0, 1])
def test_the_end_of_a_job_says_nothing_where_nobody_waited_for_long(desk: Desk, waiting: int) -> None:
    fill(desk, 1 + waiting)
    desk.claim(P1)
    if not waiting:
        desk.backend.set_drain(since=1)
    desk.finish(0, owner=P1, job="normal0/0")
    assert "jobs" not in desk.look().drain


def test_older_ends_count_less(desk: Desk) -> None:
    fill(desk, 2)
    desk.claim(P1)
    drained(desk, took_ms=1_000, slots=64, quiet_ms=9_000)
    desk.finish(0, owner=P1, job="normal0/0")
    drain = desk.look().drain
    assert drain["jobs"] == pytest.approx(2 * 63 / 64 + 1)
    assert drain["slots"] == pytest.approx(2 * 64 * 63 / 64 + 1)


def test_what_was_measured_is_forgotten_after_an_hour(server_desk: ServerDesk) -> None:
    server_desk.submit()
    assert 0 < server_desk.redis.pttl(server_desk.keys.drain) <= 3_600_000


@given(
    waiting=st.integers(1, 12), places=st.integers(1, 12), took_ms=st.integers(1, 100_000), slots=st.integers(1, 64),
    quiet_ms=st.integers(0, 10**6), tries=st.integers(1, 30),
)  # fmt: skip
@settings(max_examples=100, deadline=None)
def test_a_request_is_refused_exactly_when_there_is_no_place_and_never_told_less_than_it_needs(
    waiting: int, places: int, took_ms: int, slots: int, quiet_ms: int, tries: int
) -> None:
    desk = Desk(DoubleBackend(), checked=False)
    fill(desk, waiting)
    drained(desk, took_ms=took_ms, slots=slots, quiet_ms=quiet_ms)
    if waiting < places:
        assert submit(desk, new_job(), max_jobs=places) == ("new",)
        return
    needed_ms = (waiting + 1 - places) * took_ms / slots
    told = [refusal(desk, new_job(f"r{n}/0"), max_jobs=places).retry_ms for n in range(tries)]
    most_ms = max(needed_ms, quiet_ms + 10_000, 10 * waiting * took_ms / slots)
    assert all(min(needed_ms, 600_000) - 1 <= ms <= min(most_ms, 600_000) + 1 for ms in told), told
