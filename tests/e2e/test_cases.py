"""Public faults of preemption and of the KV hand-over, as tests on the real model and real segments."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import httpx
import orjson
import pytest
import redis

from prelay.statedir import socket_path
from tests.bed.bound import bound
from tests.bed.processes import until
from tests.bed.serving import Serving, serving

from .client import Answer, stream, together
from .test_preempt import LONG, QUESTIONS, chat, completion, preempt, preempting_at

pytestmark = [pytest.mark.model, pytest.mark.timeout(240)]


# --- equal after preempts


def preempting_once(server: Serving, after: int) -> Callable[[Answer], None]:
    """A callback that asks for a preempt from so many tokens on, until there has been one."""

    def on_frame(answer: Answer) -> None:
        epoch, seq = answer.cursors[-1]
        if epoch == 1 and seq + 1 >= after:
            preempt(server, answer.id)  # in vain where the pool has just done it

    return on_frame


@pytest.mark.slow
def test_sixteen_greedy_streams_that_are_all_preempted_are_those_of_an_empty_server(tight: Serving) -> None:
    """Case 1, vllm#38624 and vllm#42117: after a preempt a greedy stream differs, repeats tokens or lacks some.

    The pool has a block for each, and then wants a second one; an operator sees to it that nobody is spared.
    """
    prompts = (f"{n} years after the flood, the largest city" for n in range(16))
    bodies = [completion(prompt=prompt, temperature=0, max_tokens=48) for prompt in prompts]
    alone = [stream(tight.url, body) for body in bodies]
    with ThreadPoolExecutor(len(bodies)) as pool:
        crowded = list(pool.map(lambda body: stream(tight.url, body, preempting_once(tight, after=2)), bodies))

    assert len(crowded) == 16
    for one, other in zip(alone, crowded, strict=True):
        other.check()
        assert other.epochs[-1] > 1, "one was spared"
        assert other.text == one.text
        assert other.usage == one.usage


@pytest.mark.slow
def test_a_seed_gives_the_same_tokens_alone_and_preempted_in_a_crowd(tight: Serving) -> None:
    """Case 2, vllm#19940: with a seed, the tokens after a preempt are drawn anew."""
    body = completion(temperature=1, seed=7, max_tokens=LONG, logprobs=2)
    alone = stream(tight.url, body)
    others = [chat(question, temperature=1, seed=7) for question in QUESTIONS[:4]]
    with ThreadPoolExecutor(1) as pool:
        crowd = pool.submit(together, tight.url, others)
        answer = stream(tight.url, body, preempting_at(tight, 5, 20))
        crowd.result()

    answer.check()
    assert answer.epochs[-1] > 2
    assert answer.logprobs == alone.logprobs  # tokens and their values, bit for bit
    assert len(answer.logprobs) == LONG
    assert answer.text == alone.text


# --- a slow copy

SLOW = {"PRELAY_FAULTS": "copy.before=pause:0.3@*, copy.middle=pause:0.4@*"}


@pytest.mark.slow
def test_a_slow_copy_gives_what_a_unified_worker_gives(demo_model: Path) -> None:
    """Case 16, LMCache#1350: when the transfer is slow, decoding begins before all KV is there, and is wrong."""
    tale = "years after the great flood, in the largest city of the country, an old keeper wrote in his book"
    bodies = [
        *(completion(prompt=f"{n} {tale}", temperature=0, max_tokens=24) for n in (3, 70)),
        *(chat(question, temperature=1, seed=7, max_tokens=24) for question in QUESTIONS[:3]),
    ]
    small = ("--served-model-name", "demo", "--kv-blocks", "24", "--max-model-len", "256")
    with serving(*small, "--unified", "1", model=demo_model) as server:
        expected = together(server.url, bodies)
    with serving(*small, model=demo_model, environment=SLOW) as server:
        answers = together(server.url, bodies)
        server.until_drained()
        assert server.log.count("failpoint copy.middle") >= len(bodies), "the copies were not slow"
    for one, other in zip(expected, answers, strict=True):
        other.check()
        assert other.text == one.text
        assert other.usage == one.usage


# --- cancelled, and sent again


def hear_and_leave(server: Serving, body: dict[str, Any], pieces: int) -> None:
    """Stream until there have been so many events, and close the socket."""
    with httpx.stream(
        "POST", f"{server.url}/v1/chat/completions", json={**body, "stream": True}, timeout=60, verify=False
    ) as reply:
        for heard, _ in enumerate(line for line in reply.iter_lines() if line.startswith("data: ")):
            if heard >= pieces:
                return


MARKERS = ("Zanzibar", "Quetzal", "Xylophone")


@pytest.mark.slow
def test_a_chat_sent_again_just_after_it_was_cancelled_is_equal_and_nobody_hears_of_another(tight: Serving) -> None:
    """Case 17, vllm#39146: blocks of a cancelled request are given to others while its copy still goes on."""
    mine, *others = (
        chat(f"My name is {name}. Repeat my name and tell me what it means.", max_tokens=24) for name in MARKERS
    )
    alone = [stream(tight.url, body) for body in (mine, *others)]
    for pieces in (1, 7):
        with ThreadPoolExecutor(1) as pool:
            crowd = pool.submit(together, tight.url, others)
            hear_and_leave(tight, mine, pieces)
            again_at = time.monotonic() + 0.06
            until(bound(lambda moment: time.monotonic() >= moment, again_at), every_s=0.005)
            answers = [stream(tight.url, mine), *crowd.result()]
        for name, one, other in zip(MARKERS, alone, answers, strict=True):
            other.check()
            assert other.text == one.text
            assert not [marker for marker in MARKERS if marker != name and marker in other.text]


# --- references that lie

Change = Callable[[dict[str, Any]], bytes]


def another_layout(ref: dict[str, Any]) -> bytes:
    for part in ("segment", "layout"):
        ref[part]["layout_hash"] = "0" * len(ref[part]["layout_hash"])
    return orjson.dumps(ref)


def no_handle(ref: dict[str, Any]) -> bytes:
    ref["segment"]["handle"] = "../../etc/passwd"
    return orjson.dumps(ref)


def half_a_reference(ref: dict[str, Any]) -> bytes:
    return orjson.dumps(ref)[:-40]


def no_such_file(ref: dict[str, Any]) -> bytes:
    segment = ref["segment"]
    segment["handle"], segment["owner"] = segment["handle"][:-19] + 16 * "0" + ".kv", "somebody else"
    return orjson.dumps(ref)


@contextmanager
def frozen(server: Serving, role: str) -> Iterator[Callable[[], None]]:
    """The worker of a role stands still until the yielded function is called."""
    pid = server.workers(role)[0]["pid"]
    os.kill(pid, signal.SIGSTOP)
    try:
        yield lambda: os.kill(pid, signal.SIGCONT)
    finally:
        os.kill(pid, signal.SIGCONT)


def stream_with_reference(server: Serving, body: dict[str, Any], change: Change) -> Answer:
    """Stream; the reference of its KV is changed once, while the job waits for a frozen decode worker."""
    path = str(socket_path(Path(server.state.name)))
    with closing(redis.Redis(unix_socket_path=path, protocol=2)) as client, frozen(server, "decode") as go_on:
        changed = False

        def on_frame(answer: Answer) -> None:  # the first token comes from the prefill
            nonlocal changed
            if changed:
                return
            (key,) = client.keys(f"*job:{answer.id}/0")
            state, kv = client.hmget(key, "st", "kv")
            assert state == b"staged"
            assert kv
            client.hset(key, "kv", change(orjson.loads(kv)))
            changed = True
            go_on()

        answer = stream(server.url, body, on_frame)
    assert changed
    return answer


BODY = completion(prompt="In the year 2051, the smallest city", temperature=0, max_tokens=12)


@pytest.mark.parametrize(
    "change",
    [another_layout, *(pytest.param(each, marks=pytest.mark.slow) for each in (no_handle, half_a_reference))],
)
def test_a_reference_to_no_kv_of_ours_ends_the_stream_with_an_error(tight: Serving, change: Change) -> None:
    """Case 19, llm-d#2433: a corrupt segment handle, or another layout, makes the request hang."""
    pids = {worker["pid"] for worker in tight.workers()}
    asked = time.monotonic()
    answer = stream_with_reference(tight, BODY, change)
    assert time.monotonic() - asked < 15
    assert [error["code"] for error in answer.errors] == ["kv_handover_failed"]
    assert answer.done == 1
    assert answer.finish == []
    tight.until_drained()
    stream(tight.url, BODY).check()
    assert {worker["pid"] for worker in tight.workers()} == pids


@pytest.mark.slow
def test_a_reference_to_a_segment_that_is_gone_sends_the_job_back_to_its_first_step(tight: Serving) -> None:
    """Case 19 where there is hope: a new attempt has a segment of its own, so the stream goes on, and is equal."""
    undisturbed = stream(tight.url, BODY)
    answer = stream_with_reference(tight, BODY, no_such_file)
    answer.check()
    assert answer.text == undisturbed.text
    assert answer.epochs == [1, 2]
