"""Admission in the queue: what may wait is counted where it changes, and decided in the submit itself."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest

from prelay_queue.client import SyncQueue
from prelay_queue.errors import QueueBusy
from prelay_queue.job import Priority
from prelay_queue.scripts import NewJob, Scripts
from prelay_queue.state import State
from tests.bed.servers import Server
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


def backlogged(desk: Desk, *, busy: float, jobs: float, tokens: float) -> None:
    """So much was measured while something waited."""
    desk.backend.set_drain(at=desk.now_ms(), busy=busy, jobs=jobs, tokens=tokens)


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
    backlogged(desk, busy=12_000, jobs=0, tokens=0)
    assert refusal(desk, new_job(), max_jobs=3).retry_ms == pytest.approx(12_000, rel=0.05)


def test_the_refused_come_back_when_as_much_has_drained_as_they_need(desk: Desk) -> None:
    fill(desk, 10, prompt=10)
    backlogged(desk, busy=10_000, jobs=5, tokens=50)  # a job in 2 s, a token in 200 ms
    assert refusal(desk, new_job("a/0"), max_jobs=8).retry_ms == pytest.approx(6_000, rel=0.05)  # 3 too many


def test_tokens_that_are_too_many_are_waited_for_too(desk: Desk) -> None:
    fill(desk, 10, prompt=10)
    backlogged(desk, busy=10_000, jobs=5, tokens=50)
    assert refusal(desk, new_job("a/0", range(40)), max_tokens=100).retry_ms == pytest.approx(8_000, rel=0.05)


def test_each_that_is_refused_is_sent_behind_those_refused_before(desk: Desk) -> None:
    fill(desk, 10, prompt=4)
    backlogged(desk, busy=10_000, jobs=20, tokens=80)  # a job in half a second
    told = [refusal(desk, new_job(f"r{n}/0"), max_jobs=10).retry_ms for n in range(6)]
    assert told == pytest.approx([500, 1_000, 1_500, 2_000, 2_500, 3_000], rel=0.2)
    assert sorted(told) == told


def test_who_is_refused_again_and_again_does_not_push_others_out_of_sight(desk: Desk) -> None:
    fill(desk, 4)
    backlogged(desk, busy=10_000, jobs=20, tokens=80)
    told = [refusal(desk, new_job("r/0"), max_jobs=4).retry_ms for n in range(60)]
    assert max(told) <= 10 * 4 * 500 * 1.2
    assert max(told) > 10_000


def test_more_urgent_classes_are_served_before(desk: Desk) -> None:
    fill(desk, 4, priority=Priority.INTERACTIVE)
    fill(desk, 4, priority=Priority.BATCH)
    backlogged(desk, busy=10_000, jobs=10, tokens=40)
    busy = refusal(desk, new_job(priority=Priority.BATCH), max_jobs=4)
    assert busy.retry_ms == pytest.approx(1_000 + 4_000, rel=0.05)


def test_the_drain_is_measured_only_while_something_waits(desk: Desk) -> None:
    desk.to(State.DONE)
    assert desk.look().drain["jobs"] == 0  # nobody waited when it ended
    fill(desk, 2)
    desk.claim(P1)
    desk.finish(0, owner=P1, job="normal0/0")
    drain = desk.look().drain
    assert (drain["jobs"], drain["tokens"]) == pytest.approx((1, 4), rel=0.01)


def test_the_time_in_which_something_waited_is_measured_and_older_time_counts_less(desk: Desk) -> None:
    fill(desk, 2)
    desk.backend.set_drain(at=desk.now_ms() - 30_000, busy=30_000, jobs=30, tokens=300)
    desk.claim(P1)
    drain = desk.look().drain
    assert drain["jobs"] == pytest.approx(30 / 2.71828, rel=0.02)
    assert drain["tokens"] == pytest.approx(300 / 2.71828, rel=0.02)
    assert drain["busy"] == pytest.approx(30_000, rel=0.02)


def test_a_cancel_of_what_waits_is_no_drain(desk: Desk) -> None:
    fill(desk, 3)
    desk.cancel(job="normal0/0")
    assert desk.look().drain["jobs"] == 0


def test_what_was_measured_is_forgotten_after_an_hour(server_desk: ServerDesk) -> None:
    server_desk.submit()
    assert 0 < server_desk.redis.pttl(server_desk.keys.drain) <= 3_600_000
