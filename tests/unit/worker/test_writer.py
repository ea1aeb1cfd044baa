"""The writer: order, grouping, stop strings, and what it does when Redis says no or not now."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prelay_queue.errors import QueueError, QueueUnavailable
from prelay_queue.job import FinishReason
from prelay_queue.keys import Keys
from prelay_queue.scripts import Call, Emission, Emitted, Scripts
from prelay_queue.settings import QueueSettings
from prelay_worker.messages import Exported, Message, Release, Stop
from prelay_worker.writer import (
    PATIENCE_S,
    Adopt,
    Begin,
    Expire,
    Fail,
    Forget,
    GiveUp,
    Handoff,
    Recall,
    Tokens,
    Write,
    Writer,
    _group,
)

Answer = Any


class FakeQueue:
    """Answers calls from a list; records what was sent. An exception in the list is raised."""

    def __init__(self, answers: Iterable[Answer] = ()) -> None:
        self.settings = QueueSettings("unix:///nowhere", "t")
        self.scripts = Scripts(Keys("t"))
        self.sent: list[list[Call[Any]]] = []
        self._answers = list(answers)

    def run_many(self, calls: Sequence[Call[Any]]) -> list[Any]:
        self.sent.append(list(calls))
        if self._answers:
            answer = self._answers.pop(0)
            if isinstance(answer, Exception):
                raise answer
            return list(answer)
        return [[Emitted("ok", 0)] * emissions(call) if call.name == "emit" else "ok" for call in calls]


def emissions(call: Call[Any]) -> int:
    """How many emissions the call carries."""
    payload = call.args[1]
    assert isinstance(payload, bytes)
    return len(orjson.loads(payload))


class StopAt:
    """A matcher of one token: no tokenizer needed."""

    def __init__(self, token: int) -> None:
        self.token = token
        self.seen: list[int] = []

    def push(self, token: int) -> object | None:
        self.seen.append(token)
        return token if token == self.token else None


def write(queue: FakeQueue, *writes: Write, stops: dict[str, StopAt] | None = None) -> list[Message]:
    """Let a writer write these, all in one batch if it can; what it told the model loop."""
    said: list[Message] = []
    writer = Writer(queue, "me", "here", said.append)  # type: ignore[arg-type]
    for key, matcher in (stops or {}).items():
        writer.watch(key, matcher)
    writer.put(writes, lambda: None)
    writer.start()
    writer.stop(timeout_s=10)
    return said


def names(queue: FakeQueue) -> list[str]:
    return [call.name for batch in queue.sent for call in batch]


def test_each_operation_becomes_its_script_in_order() -> None:
    queue = FakeQueue()
    write(
        queue,
        Handoff("a", 1, 0, 5, b"kv"),
        Adopt("b", 1),
        Tokens("b", 1, 0, (1,)),
        Tokens("b", 1, 1, (2,), FinishReason.LENGTH),
        GiveUp("c", 1, "kv"),
        Fail("d", 1, 0, "{}"),
    )
    assert names(queue) == ["handoff", "adopt", "emit", "finish", "preempt", "finish"]
    assert len(queue.sent) == 1


def test_what_gathered_since_the_last_round_trip_goes_out_as_one_emission() -> None:
    queue = FakeQueue()
    write(queue, Tokens("a", 1, 0, (1,)), Tokens("b", 1, 4, (2,)), Tokens("a", 1, 1, (3,)), Tokens("b", 1, 5, (4,)))
    ((call,),) = queue.sent
    expected = queue.scripts.emit("me", [Emission("a", 1, 0, (1, 3)), Emission("b", 1, 4, (2, 4))])
    assert call.args == expected.args


plain = st.builds(lambda job, count: (job, count), st.sampled_from(["a", "b", "c"]), st.integers(1, 3))


@given(st.lists(plain, max_size=30), st.data())
def test_grouping_keeps_the_order_of_every_job_and_loses_nothing(
    parts: list[tuple[str, int]], data: st.DataObject
) -> None:
    seqs = dict.fromkeys("abc", 0)
    batch: list[Write] = []
    for job, count in parts:
        batch.append(Tokens(job, 1, seqs[job], tuple(range(seqs[job], seqs[job] + count))))
        seqs[job] += count
        if data.draw(st.integers(0, 5)) == 0:
            batch.append(Adopt(job, 1))
    groups = _group(batch)
    for job in "abc":
        flat = [each for group in groups for each in group if each.job == job]
        ids = [token for each in flat if isinstance(each, Tokens) for token in each.ids]
        assert ids == list(range(seqs[job]))
        kinds = [type(each) for each in flat]
        assert kinds.count(Adopt) == sum(isinstance(each, Adopt) and each.job == job for each in batch)
    assert all(len(group) == 1 or all(isinstance(each, Tokens) for each in group) for group in groups)


# Tokens that may wait.


def patient(job: str, seq: int, *ids: int, reason: FinishReason | None = None) -> Tokens:
    return Tokens(job, 1, seq, ids, reason, patient=True)


def test_a_short_answer_that_may_wait_is_one_write() -> None:
    queue = FakeQueue()
    write(queue, Adopt("a", 1), patient("a", 0, 1), patient("a", 1, 2), patient("a", 2, 3, reason=FinishReason.STOP))
    ((adopt, finish),) = queue.sent
    assert adopt.name == "adopt"
    assert finish.args == queue.scripts.finish("a", 1, "me", 0, (1, 2, 3), "stop").args


@pytest.mark.parametrize("last", [GiveUp("a", 1, "kv"), Fail("a", 1, 2, "{}"), Expire("a", 1), Adopt("a", 1)])
def test_tokens_that_wait_are_written_before_anything_else_of_their_attempt(last: Write) -> None:
    queue = FakeQueue()
    write(queue, patient("b", 0, 5), patient("a", 0, 1), patient("a", 1, 2), last)
    first, second, third = (call for batch in queue.sent for call in batch)
    assert first.args == queue.scripts.emit("me", [Emission("a", 1, 0, (1, 2))]).args
    assert (second.name, second.args[0]) != ("emit", "me")
    assert third.args == queue.scripts.emit("me", [Emission("b", 1, 0, (5,))]).args, "what waits is written at the end"


def test_tokens_wait_for_more_but_not_for_long_and_keep_nobody_waiting() -> None:
    queue = FakeQueue()
    writer = Writer(queue, "me", "here", lambda _: None)  # type: ignore[arg-type]
    assert writer._due([patient("a", 0, 1), Tokens("b", 1, 0, (9,))], all_=False) == [Tokens("b", 1, 0, (9,))]
    assert writer._due([patient("a", 1, 2)], all_=False) == []
    began = time.monotonic()
    batch, ended = writer._gather()  # nothing comes: it returns when their time is over
    assert time.monotonic() - began <= PATIENCE_S + 0.5
    assert writer._due(batch, all_=ended) == [patient("a", 0, 1, 2)]
    assert writer._due([], all_=False) == []


# Stop strings.


def test_the_token_that_completes_a_stop_string_ends_the_job_and_what_follows_is_dropped() -> None:
    queue = FakeQueue()
    said = write(
        queue,
        Tokens("a", 1, 0, (1,)),
        Tokens("a", 1, 1, (9,)),
        Tokens("a", 1, 2, (3,)),
        Tokens("b", 1, 0, (9,)),
        stops={"a@1": StopAt(9)},
    )
    assert names(queue) == ["emit", "finish", "emit"]
    finish = queue.sent[0][1]
    assert finish.args == queue.scripts.finish("a", 1, "me", 1, (9,), FinishReason.STOP).args
    assert said == [Stop("a", 1, "stop string")]


def test_a_stop_in_the_middle_of_several_tokens_cuts_them() -> None:
    queue = FakeQueue()
    write(queue, Tokens("a", 1, 4, (1, 9, 3)), stops={"a@1": StopAt(9)})
    ((finish,),) = queue.sent
    assert finish.args == queue.scripts.finish("a", 1, "me", 4, (1, 9), FinishReason.STOP).args


def test_a_stop_on_the_last_token_allowed_is_a_stop_and_not_a_length() -> None:
    queue = FakeQueue()
    write(queue, Tokens("a", 1, 4, (9,), FinishReason.LENGTH), stops={"a@1": StopAt(9)})
    ((finish,),) = queue.sent
    assert finish.args[5] == "stop"


def test_a_first_token_that_completes_a_stop_ends_the_job_instead_of_handing_it_over() -> None:
    queue = FakeQueue()
    said = write(queue, Handoff("a", 1, 0, 9, b"kv"), stops={"a@1": StopAt(9)})
    assert names(queue) == ["finish"]
    assert said == [Stop("a", 1, "stop string")]


def test_a_matcher_belongs_to_one_attempt() -> None:
    queue = FakeQueue()
    write(queue, Tokens("a", 2, 0, (9,)), stops={"a@1": StopAt(9)})
    assert names(queue) == ["emit"]


def test_nothing_is_written_for_an_attempt_after_it_was_given_up() -> None:
    queue = FakeQueue()
    write(queue, GiveUp("a", 1, "kv"), Tokens("a", 1, 0, (1,)), Adopt("a", 1), Tokens("a", 2, 0, (1,)))
    assert names(queue) == ["preempt", "emit"]


def test_an_attempt_of_a_name_that_was_lost_before_is_written_when_it_is_claimed_anew() -> None:
    queue = FakeQueue()
    write(queue, GiveUp("a", 2, "kv"), Begin("a", 2), Handoff("a", 2, 0, 1, b"kv"))
    assert names(queue) == ["preempt", "handoff"]


# Answers.


@pytest.mark.parametrize("code", ["fenced", "done", "gone", "gap", "illegal"])
def test_a_refused_write_stops_the_attempt(code: str) -> None:
    queue = FakeQueue([[[Emitted("ok", 1), Emitted(code, 0)]]])
    said = write(queue, Tokens("a", 1, 0, (1,)), Tokens("b", 1, 0, (1,)))
    assert said == [Stop("b", 1, code)]


def test_a_hand_over_that_stands_is_reported() -> None:
    assert write(FakeQueue(), Handoff("a", 1, 0, 5, b"kv")) == [Exported("a@1")]
    assert write(FakeQueue([["fenced"]]), Handoff("a", 1, 0, 5, b"kv")) == [Stop("a", 1, "fenced")]


@pytest.mark.parametrize(
    "trouble",
    [QueueUnavailable("away"), [[Emitted("ok", 1)], QueueUnavailable("read only")], [QueueUnavailable("x"), "ok"]],
    ids=["the whole batch", "a late answer", "an early answer"],
)
def test_a_batch_is_sent_again_whole_until_every_part_is_answered(trouble: Answer) -> None:
    queue = FakeQueue([trouble, trouble])
    said = write(queue, Tokens("a", 1, 0, (1,)), Adopt("b", 1))
    assert said == []
    assert len(queue.sent) == 3
    assert queue.sent[0] == queue.sent[1] == queue.sent[2]


def test_an_error_that_no_repeat_mends_stops_the_attempts_it_hits_and_only_those() -> None:
    queue = FakeQueue([[QueueError("broken"), "ok"]])
    said = write(queue, Tokens("a", 1, 0, (1,)), Adopt("b", 1))
    assert [message.job for message in said if isinstance(message, Stop)] == ["a"]


def test_a_forgotten_attempt_leaves_no_matcher_and_its_earlier_writes_go_out() -> None:
    queue = FakeQueue()
    writer = Writer(queue, "w", "here", lambda _: None)  # type: ignore[arg-type]
    writer.watch("a/0@1", StopAt(9))
    writer.watch("b/0@1", StopAt(9))

    writer.put([Tokens("a/0", 1, 0, (1,))], lambda: None)
    batch, _ = writer._gather()
    writer._matched(Forget("a/0", 1))

    assert batch == [Tokens("a/0", 1, 0, (1,))]
    assert list(writer._matchers) == ["b/0@1"]


@pytest.mark.parametrize("code", ["ok", "fenced", "done", "gone"])
def test_a_staged_job_that_is_asked_back_is_freed_only_if_no_decode_worker_has_it(code: str) -> None:
    queue = FakeQueue([[code]])
    assert write(queue, Recall("r/0", 1, "urgent")) == ([Release("r/0", 1)] if code == "ok" else [])
    ((call,),) = queue.sent
    assert (call.name, call.args) == ("preempt", ("r/0", 1, "me", "urgent"))
