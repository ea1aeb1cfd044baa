"""What the queue notes for people: the way of a job, and the attempts that did not end it."""

from __future__ import annotations

from prelay_queue.history import Step, read_history, read_letters, read_restarts
from prelay_queue.state import State
from tests.integration.queue_desk import API, D1, DOMAIN, JOB, P1, Desk


def steps(desk: Desk) -> list[tuple[object, ...]]:
    """The history without its moments, which only go forward."""
    found = read_history(desk.fields()["tl"])
    assert sorted(step.ms for step in found) == [step.ms for step in found]
    assert abs(found[-1].ms - desk.now_ms()) < 20_000
    return [(step.state, step.epoch, step.tokens, step.worker, step.why) for step in found]


def test_the_history_tells_who_had_a_job_and_why_it_began_again(desk: Desk) -> None:
    desk.to(State.PREEMPTED)
    desk.requeue(1, f"{API}#1")
    desk.claim(P1)
    desk.crash()
    desk.cancel()
    assert steps(desk) == [
        ("queued", 1, 0, "", ""),
        ("prefill", 1, 0, P1, ""),
        ("staged", 1, 1, P1, ""),
        ("adopting", 1, 1, D1, ""),
        ("decode", 1, 1, D1, ""),
        ("preempted", 1, 3, D1, "kv"),
        ("queued", 2, 1, "", ""),
        ("prefill", 2, 1, P1, ""),
        ("queued", 3, 1, "", "lease ended"),
        ("done", 3, 1, "", "cancelled"),
    ]


def test_the_history_keeps_the_last_64_steps(desk: Desk) -> None:
    desk.submit()
    for epoch in range(1, 41):
        desk.claim(P1)
        desk.run(desk.scripts.preempt(JOB, epoch, P1, "kv"))
        desk.requeue(-1, epoch=epoch)
    found = steps(desk)
    assert len(found) == 64
    assert found[-1] == ("queued", 41, 0, "", "")


def test_every_restart_is_noted_with_what_was_discarded(desk: Desk) -> None:
    desk.to(State.PREEMPTED)
    desk.requeue(1, f"{API}#1")
    desk.claim(P1)
    desk.crash()
    restarts = read_restarts(desk.entries(desk.keys.restarts))
    told = [(each.job, each.epoch, each.state, each.worker, each.why, each.lost) for each in restarts]
    assert told == [(JOB, 1, "preempted", D1, "kv", 2), (JOB, 2, "prefill", P1, "lease ended", 0)]


def test_a_dead_letter_has_what_is_needed_to_try_again(desk: Desk) -> None:
    spec = desk.to(State.DECODE).spec
    for epoch in range(1, 5):
        desk.crash()
        if epoch < 4:
            desk.claim(P1)
            desk.handoff(epoch + 1, P1, seq=3 if epoch == 1 else 3 + epoch - 1)
            desk.claim(D1, f"decode:{DOMAIN}")
            desk.adopt(epoch + 1)
    (letter,) = read_letters(desk.entries(desk.keys.dead))
    assert (letter.job, letter.spec) == (JOB, spec.encode())


def test_a_line_that_cannot_be_read_is_left_out() -> None:
    assert read_history("") == ()
    assert read_history("x y\n17 done 2 5 - stop") == (Step(17, "done", 2, 5, "", "stop"),)
