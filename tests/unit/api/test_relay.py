"""The relay alone: worked examples of each rule, then random histories of a job with a lossy live path."""

from __future__ import annotations

import hashlib
from collections import deque
from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from prelay_api.relay import Action, Deliver, End, Relay, Requeue, Reread, Resubmit, Rewind
from prelay_queue.events import EndedEvent, LiveEvent, LogView, PreemptedEvent, RequeuedEvent, TokensEvent
from prelay_queue.job import FinishReason
from prelay_queue.scripts import Requeued
from prelay_queue.state import State

JOB = "cmpl-1/0"


def tokens(epoch: int, seq: int, *ids: int) -> TokensEvent:
    return TokensEvent(JOB, epoch, seq, ids)


def view(epoch: int, *ids: int, state: str = "decode", resume: int = 0, reason: str = "") -> LogView:
    """A log whose tokens from `resume` on are of `epoch`, and the others of the one before."""
    epochs = tuple(epoch if seq >= resume else max(1, epoch - 1) for seq in range(len(ids)))
    return LogView(epoch, state, ids, resume, reason, epochs=epochs)


def relay_with(*ids: int, delivered: int = 0, keep_delivered: bool = True) -> Relay:
    relay = Relay(max_tokens=100, keep_delivered=keep_delivered)
    relay.on_event(tokens(1, 0, *ids))
    if delivered:
        relay.take()
        relay.mark_delivered(delivered)
    return relay


def test_tokens_in_order_are_offered_and_taken_once() -> None:
    relay = Relay(max_tokens=10)
    assert relay.on_event(tokens(1, 0, 7)) == [Deliver()]
    assert relay.on_event(tokens(1, 1, 8, 9)) == [Deliver()]
    assert relay.take() == (7, 8, 9)
    assert relay.take() == ()


def test_a_doubled_event_changes_nothing_and_an_overlapping_one_adds_its_end() -> None:
    relay = relay_with(7, 8)
    relay.on_event(tokens(1, 0, 7, 8))
    relay.on_event(tokens(1, 1, 8, 9))
    assert relay.take() == (7, 8, 9)


def test_a_gap_is_filled_from_the_log() -> None:
    relay = relay_with(7)
    assert relay.on_event(tokens(1, 2, 9)) == [Reread()]
    assert relay.on_log(view(1, 7, 8, 9)) == [Deliver()]
    assert relay.take() == (7, 8, 9)


def test_a_preempt_freezes_delivery_and_requeues_at_what_was_delivered() -> None:
    relay = relay_with(7, 8, 9, delivered=2)
    relay.on_event(tokens(1, 3, 10))
    assert relay.on_event(PreemptedEvent(JOB, 1, "pressure")) == [Requeue(1, 2)]
    assert relay.take() == ()
    assert relay.ids == [7, 8, 9, 10]  # nothing is dropped before the answer
    assert relay.on_requeued(Requeued("ok", 2, 2)) == [Rewind(2)]
    assert relay.ids == [7, 8]
    relay.on_event(tokens(2, 2, 19))
    assert relay.take() == (19,)


def test_a_preempt_that_keeps_what_was_emitted_asks_for_it() -> None:
    relay = relay_with(7, 8, delivered=1, keep_delivered=False)
    assert relay.on_event(PreemptedEvent(JOB, 1, "pressure")) == [Requeue(1, -1)]
    assert relay.on_requeued(Requeued("ok", 2, 2)) == []
    assert relay.ids == [7, 8]


def test_a_preempt_before_any_delivery_restarts_from_scratch() -> None:
    relay = relay_with(7, 8)
    assert relay.on_event(PreemptedEvent(JOB, 1, "pressure")) == [Requeue(1, 0)]


def test_a_doubled_preempt_asks_once() -> None:
    relay = relay_with(7)
    relay.on_event(PreemptedEvent(JOB, 1, "pressure"))
    assert relay.on_event(PreemptedEvent(JOB, 1, "pressure")) == []


def test_a_requeue_won_by_another_keeps_what_the_winner_kept() -> None:
    relay = relay_with(7, 8, 9, delivered=1)
    relay.on_event(PreemptedEvent(JOB, 1, "pressure"))
    assert relay.on_requeued(Requeued("lost", 2, 3)) == []
    assert relay.ids == [7, 8, 9]
    assert relay.epoch == 2


def test_a_winner_that_kept_more_than_is_held_here_sends_the_relay_to_the_log() -> None:
    relay = relay_with(7, delivered=1)
    relay.on_event(PreemptedEvent(JOB, 1, "pressure"))
    assert relay.on_requeued(Requeued("lost", 2, 3)) == [Reread()]
    assert relay.take() == ()
    assert relay.on_log(view(2, 7, 8, 9, state="queued", resume=3)) == [Deliver()]
    assert relay.take() == (8, 9)


def test_a_requeue_that_is_only_heard_of_is_followed() -> None:
    relay = relay_with(7, 8, 9, delivered=1)
    assert relay.on_event(RequeuedEvent(JOB, 2, 2)) == [Rewind(2)]
    assert relay.ids == [7, 8]


def test_an_attempt_that_passed_unseen_sends_the_relay_to_the_log() -> None:
    relay = relay_with(7, 8, 9)
    assert relay.on_event(RequeuedEvent(JOB, 3, 2)) == [Reread()]
    assert relay.on_event(tokens(2, 3, 9)) == [Reread()]


def test_events_of_an_older_attempt_are_dropped() -> None:
    relay = relay_with(7)
    relay.on_event(RequeuedEvent(JOB, 2, 1))
    for late in (tokens(1, 1, 8), PreemptedEvent(JOB, 1, ""), EndedEvent(JOB, 1, 1, "stop"), RequeuedEvent(JOB, 2, 1)):
        assert relay.on_event(late) == []
    assert relay.ids == [7]


def test_the_end_comes_once_and_only_after_every_token() -> None:
    relay = relay_with(7)
    assert relay.on_event(EndedEvent(JOB, 1, 2, "stop")) == [Reread()]
    end = End(FinishReason.STOP)
    assert relay.on_log(view(1, 7, 8, state=State.DONE, reason="stop")) == [end]
    assert relay.on_event(EndedEvent(JOB, 1, 2, "stop")) == []
    assert relay.on_log(view(1, 7, 8, state=State.DONE, reason="stop")) == []
    assert relay.take() == (7, 8)
    assert relay.end == end


def test_an_attempt_that_rewrites_what_was_delivered_ends_in_an_error() -> None:
    relay = relay_with(7, 8, delivered=2)
    relay.on_event(RequeuedEvent(JOB, 2, 0))  # Redis went back behind what the client has
    assert relay.on_event(tokens(2, 0, 7)) == []
    (end,) = relay.on_event(tokens(2, 1, 99))
    assert isinstance(end, End)
    assert end.reason is FinishReason.ERROR
    assert "diverged" in end.error
    assert relay.take() == ()


def test_an_attempt_that_repeats_what_was_delivered_goes_on() -> None:
    relay = relay_with(7, 8, delivered=2)
    relay.on_event(RequeuedEvent(JOB, 2, 0))
    assert relay.on_event(tokens(2, 0, 7, 8)) == []
    assert relay.on_event(tokens(2, 2, 9)) == [Deliver()]
    assert relay.take() == (9,)


def test_a_log_that_contradicts_what_was_delivered_ends_in_an_error() -> None:
    relay = relay_with(7, 8, delivered=2)
    (end,) = relay.on_log(view(1, 7, 9))
    assert isinstance(end, End)
    assert "diverged" in end.error


def test_a_log_that_differs_beyond_what_was_delivered_rewinds() -> None:
    relay = relay_with(7, 8, 9, delivered=1)
    assert relay.on_log(view(2, 7, 18, state="decode", resume=1)) == [Rewind(1), Deliver()]
    assert relay.take() == (18,)


def test_a_job_that_redis_lost_is_submitted_with_all_that_is_held() -> None:
    relay = relay_with(7, 8, delivered=1)
    assert relay.on_log(None) == [Resubmit(2, (7, 8))]
    assert relay.on_submitted("new", 2) == []
    relay.on_event(tokens(2, 2, 9))
    assert relay.take() == (9,)


def test_a_lost_job_whose_answer_is_complete_just_ends() -> None:
    relay = Relay(max_tokens=2)
    relay.on_event(tokens(1, 0, 7, 8))
    assert relay.on_log(None) == [End(FinishReason.LENGTH)]


def test_the_cursor_names_the_log_entry_of_the_last_token_delivered() -> None:
    relay = relay_with(7, 8)
    assert relay.cursor == "0-0"
    relay.take()
    relay.mark_delivered(2)
    assert relay.cursor == "1-1"
    relay.on_event(RequeuedEvent(JOB, 2, 2))
    relay.on_event(tokens(2, 2, 9))
    assert relay.cursor == "1-1"
    relay.take()
    relay.mark_delivered(3)
    assert relay.cursor == "2-2"
    relay.on_event(EndedEvent(JOB, 2, 3, "stop"))
    assert relay.end_cursor == "2-3"


# --- random histories


def divergent_token(ids: tuple[int, ...], epoch: int) -> int:
    """A token that depends on all before it and on the attempt, so that no wrong resume can pass for a right one."""
    return int.from_bytes(hashlib.blake2b(repr((ids, epoch)).encode(), digest_size=4).digest())


@dataclass
class Job:
    """The job as Redis has it: log, epoch, state; and what went out on the live path."""

    max_tokens: int
    log: list[int] = field(default_factory=list)
    epoch: int = 1
    resume: int = 0
    state: str = State.DECODE
    reason: str = ""
    sent: list[LiveEvent] = field(default_factory=list)
    written_in: list[int] = field(default_factory=list)

    def emit(self, count: int) -> None:
        if self.state != State.DECODE:
            return
        count = min(count, self.max_tokens - len(self.log))
        seq, fresh = len(self.log), []
        for _ in range(count):
            fresh.append(divergent_token(tuple(self.log), self.epoch))
            self.log.append(fresh[-1])
            self.written_in.append(self.epoch)
        if fresh:
            self.sent.append(TokensEvent(JOB, self.epoch, seq, tuple(fresh)))
        if len(self.log) == self.max_tokens:
            self.finish("length")

    def preempt(self) -> None:
        if self.state == State.DECODE:
            self.state = State.PREEMPTED
            self.sent.append(PreemptedEvent(JOB, self.epoch, "pressure"))

    def restart(self, resume: int) -> None:
        if self.state == State.DONE:
            return
        if not 0 <= resume <= len(self.log):
            resume = len(self.log)
        del self.log[resume:], self.written_in[resume:]
        self.epoch, self.resume, self.state = self.epoch + 1, resume, State.DECODE
        self.sent.append(RequeuedEvent(JOB, self.epoch, resume))

    def requeue(self, epoch: int, resume: int) -> Requeued:
        if self.state == State.DONE:
            return Requeued("done", self.epoch, len(self.log))
        if self.state != State.PREEMPTED or epoch != self.epoch:
            return Requeued("lost", self.epoch, self.resume)
        self.restart(resume)
        return Requeued("ok", self.epoch, self.resume)

    def finish(self, reason: str) -> None:
        if self.state != State.DONE:
            self.state, self.reason = State.DONE, reason
            self.sent.append(EndedEvent(JOB, self.epoch, len(self.log), reason))

    def view(self) -> LogView:
        epochs = tuple(self.written_in)
        return LogView(self.epoch, self.state, tuple(self.log), self.resume, self.reason, epochs=epochs)


class Viewer:
    """A driver without I/O: Redis answers when `answer` is called, and events wait meanwhile, as in the real one."""

    def __init__(self, job: Job, keep_delivered: bool) -> None:
        self.job = job
        self.relay = Relay(job.max_tokens, keep_delivered)
        self.asked: deque[Action] = deque()
        self.waiting: deque[LiveEvent] = deque()
        self.assembled: list[int] = []
        self.seen: list[int] = []  # what the client can never unsee
        self.ends: list[End] = []

    def feed(self, event: LiveEvent) -> None:
        self.waiting.append(event)
        self.listen()

    def listen(self) -> None:
        while self.waiting and not self.asked:
            self.perform(self.relay.on_event(self.waiting.popleft()))

    def want_log(self) -> None:
        if not self.asked:
            self.asked.append(Reread())

    def answer(self) -> None:
        """Redis answers what was asked first."""
        if not self.asked:
            return
        match self.asked.popleft():
            case Requeue(epoch, resume):
                self.perform(self.relay.on_requeued(self.job.requeue(epoch, resume)))
            case Reread():
                self.perform(self.relay.on_log(self.job.view()))
            case action:
                raise AssertionError(f"{action}: nothing was lost here")
        self.listen()

    def perform(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case Rewind(count):
                    assert count >= len(self.seen)
                    del self.assembled[count:]
                case End():
                    self.ends.append(action)
                case Deliver():
                    assert self.relay.pending
                case _:
                    self.asked.append(action)

    def read(self, held_back: int) -> None:
        """The client's socket takes a frame; an assembler may hold the last few tokens back until more come."""
        fresh = self.relay.take()
        self.assembled.extend(fresh)
        if not fresh and not self.ends:
            return
        count = max(len(self.seen), len(self.assembled) - held_back)
        self.relay.mark_delivered(count)
        self.seen.extend(self.assembled[len(self.seen) : count])
        assert self.seen == self.assembled[: len(self.seen)]


#: What may happen next, with a number that says how much or which; frequent things stand more than once.
#: sweep: another process requeues, keeping what was emitted. reap: a lost lease. hear: take the n-th waiting event,
#: so out of order. again: hear an event of long ago. silence: look at the log.
KINDS = (
    ["emit"] * 5 + ["preempt"] * 4 + ["sweep"] + ["reap"] + ["read"] * 5 + ["hear"] * 8 + ["again"] * 3
    + ["lose"] + ["silence"] + ["answer"] * 4
)  # fmt: skip
steps = st.tuples(st.sampled_from(KINDS), st.integers(0, 3))


@given(st.lists(steps, min_size=30, max_size=80), st.booleans(), st.integers(1, 60), st.booleans())
@settings(max_examples=400, deadline=None)
def test_whatever_happens_the_client_gets_the_logs_final_ids_and_one_end(
    history: list[tuple[str, int]], keep_delivered: bool, max_tokens: int, stops: bool
) -> None:
    job = Job(max_tokens)
    viewer = Viewer(job, keep_delivered)
    past: list[LiveEvent] = []
    for what, number in history:
        match what:
            case "emit":
                job.emit(number + 1)
            case "preempt":
                job.preempt()
            case "sweep" if job.state == State.PREEMPTED:
                job.restart(-1)
            case "reap":
                job.restart(-1)
            case "read":
                viewer.read(number)
            case "hear" if job.sent:
                past.append(job.sent.pop(min(number, len(job.sent) - 1)))
                viewer.feed(past[-1])
            case "again" if past:
                viewer.feed(past[number % len(past)])
            case "lose" if job.sent:
                past.append(job.sent.pop(min(number, len(job.sent) - 1)))
            case "silence":
                viewer.want_log()
            case "answer":
                viewer.answer()
    # Then the world calms down: the client reads on, the job goes to its end, silence makes the relay look.
    if stops:
        job.finish("stop")
    while not viewer.ends:
        job.emit(3)
        viewer.read(1)
        viewer.want_log()
        viewer.answer()
    for event in [*job.sent, *past]:
        viewer.feed(event)
    while viewer.asked:
        viewer.answer()
    viewer.read(0)
    assert viewer.seen == job.log
    assert viewer.ends == [End(FinishReason(job.reason))]


@given(st.lists(steps, min_size=20, max_size=60), st.lists(st.integers(0, 40), min_size=1, max_size=3))
@settings(max_examples=300, deadline=None)
def test_a_redis_that_goes_back_in_time_never_makes_the_client_see_a_contradiction(
    history: list[tuple[str, int]], rollbacks: list[int]
) -> None:
    job = Job(max_tokens=20)
    viewer = Viewer(job, keep_delivered=True)
    for at, (what, number) in enumerate(history):
        match what:
            case "emit":
                job.emit(number)
            case "preempt":
                job.preempt()
            case "read":
                viewer.read(number)
            case "hear" if job.sent:
                viewer.feed(job.sent.pop(0))
            case "silence":
                viewer.want_log()
            case "answer":
                viewer.answer()
        if at in rollbacks and job.state != State.DONE:
            job.log = job.log[: len(job.log) // 2]
            job.epoch, job.resume, job.state = max(1, job.epoch - 1), 0, State.DECODE
    while not viewer.ends:
        job.emit(3)
        viewer.read(1)
        viewer.want_log()
        viewer.answer()
    viewer.read(0)
    assert len(viewer.ends) == 1
    if viewer.ends[0].reason is FinishReason.ERROR:
        assert "diverged" in viewer.ends[0].error
    else:
        assert viewer.seen == job.log
