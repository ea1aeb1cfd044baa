"""Deadlines over HTTP: how they are asked for, what a client hears, and what happens when others are dead."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prelay_api.deadline import deadline_ms
from prelay_queue.client import SyncQueue
from prelay_queue.scripts import text
from prelay_text.errors import RequestError
from prelay_worker.config import NullModel, Role
from tests.bed.chain import Listener
from tests.bed.http import post
from tests.bed.processes import Api, Fleet, fleet, until, until_ready
from tests.bed.scripted import ScriptedWorker
from tests.bed.servers import Server
from tests.bed.tokenizer import chat

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
DAY_MS = 86_400_000


def exceeded(ms: int) -> dict[str, Any]:
    """What is told when a deadline of so many ms has passed."""
    message = f"the request was not complete within its deadline_ms, which is {ms}"
    return {"message": message, "type": "server_error", "param": "deadline_ms", "code": "deadline_exceeded"}


def body(**more: Any) -> dict[str, Any]:
    return {"model": "null", "prompt": [1, 2], "max_tokens": 50, **more}


def ask(api: Api, header: str | None = None, **more: Any) -> httpx.Response:
    return post(api.url + COMPLETIONS, json=body(**more), headers={} if header is None else {"X-Deadline-Ms": header})


@pytest.fixture
def posts() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as pool:
        yield pool


def server_ms(queue: SyncQueue) -> int:
    seconds, micros = queue.redis.time()
    return int(seconds) * 1000 + int(micros) // 1000


# What is asked for.


@pytest.mark.parametrize(
    ("header", "more"),
    [("60000", {}), (None, {"deadline_ms": 60_000}), ("60000", {"deadline_ms": 60_000})],
    ids=["header", "body", "both"],
)
def test_a_deadline_travels_with_the_job(
    quiet_api: Api, scripted: ScriptedWorker, posts: ThreadPoolExecutor, header: str | None, more: dict[str, Any]
) -> None:
    reply = posts.submit(ask, quiet_api, header, **more)
    claim = scripted.take()
    assert abs(claim.deadline_ms - server_ms(scripted.queue) - 60_000) < 5_000
    scripted.finish(claim, 0, [5])
    assert reply.result().status_code == 200


def test_every_choice_has_it(quiet_api: Api, scripted: ScriptedWorker, posts: ThreadPoolExecutor) -> None:
    reply = posts.submit(ask, quiet_api, "60000", n=2)
    claims = [scripted.take(), scripted.take()]
    assert len({claim.deadline_ms // 1000 for claim in claims}) <= 2
    assert all(claim.deadline_ms for claim in claims)
    for claim in claims:
        scripted.finish(claim, 0, [5])
    assert reply.result().status_code == 200


@pytest.mark.parametrize("header", ["0", "-5", "1.5", "soon", "", "1e3", "0x10", "86400001", "9" * 400, "\u0661"])
def test_a_header_that_says_no_time_is_refused_by_name(quiet_api: Api, header: str) -> None:
    reply = post(
        quiet_api.url + COMPLETIONS,
        json=body(),
        headers={b"X-Deadline-Ms": header.encode()},
    )
    assert reply.status_code == 400
    error = reply.json()["error"]
    assert (error["param"], error["code"]) == ("X-Deadline-Ms", "invalid_value")
    assert "X-Deadline-Ms must be an integer from 1 to 86400000" in error["message"]


@pytest.mark.parametrize("value", [0, DAY_MS + 1, 1.5, "60000", True])
def test_a_body_that_says_no_time_is_refused_by_name(quiet_api: Api, value: object) -> None:
    reply = ask(quiet_api, deadline_ms=value)
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "deadline_ms")


def test_a_header_and_a_body_that_disagree_are_refused(quiet_api: Api) -> None:
    reply = ask(quiet_api, "1000", deadline_ms=2_000)
    assert reply.status_code == 400
    assert "disagree (1000, 2000)" in reply.json()["error"]["message"]


times = st.integers(-2, DAY_MS + 2)


@given(headers=st.lists(times.map(str) | st.text(max_size=12), max_size=3), said=st.none() | st.integers(1, DAY_MS))
def test_what_is_said_is_one_time_or_refused(headers: list[str], said: int | None) -> None:
    def valid(value: str) -> bool:
        return value.strip().isascii() and value.strip().isdecimal() and 1 <= int(value) <= DAY_MS

    named = {int(value) for value in headers if valid(value)} | ({said} if said is not None else set())
    if len(named) > 1 or not all(map(valid, headers)):
        with pytest.raises(RequestError):
            deadline_ms(headers, said)
    else:
        assert deadline_ms(headers, said) == (named.pop() if named else None)


# What the client hears.


def test_an_answer_in_one_piece_that_is_late_is_a_504(
    quiet_api: Api, scripted: ScriptedWorker, posts: ThreadPoolExecutor
) -> None:
    scripted.listen()
    began = time.monotonic()
    reply = posts.submit(ask, quiet_api, "700")
    claim = scripted.take()
    scripted.emit(claim, 0, [10, 11])
    found = reply.result()
    assert 0.7 <= time.monotonic() - began < 5
    assert (found.status_code, found.json()["error"]) == (504, exceeded(700))
    assert "retry-after" not in found.headers
    until(lambda: scripted.heard())
    assert scripted.heard() == [{"op": "stop", "id": claim.id, "ep": 1}]
    assert scripted.state(claim.id)["fin"] == "deadline"


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_a_stream_that_is_late_ends_with_an_error_event_after_what_it_has(
    quiet_api: Api, scripted: ScriptedWorker, path: str
) -> None:
    prompt = {"prompt": [1, 2]} if path == COMPLETIONS else {"messages": chat([1])}
    client = Listener(quiet_api.url, path, {"model": "null", "max_tokens": 50, "deadline_ms": 900, **prompt})
    claim = scripted.take()
    scripted.emit(claim, 0, [10, 11])
    found = client.end()
    assert found.choices[0].ids == [10, 11]
    assert found.error == exceeded(900)
    assert found.done
    assert not found.choices[0].finishes
    assert scripted.state(claim.id)["fin"] == "deadline"


def test_a_request_that_no_worker_takes_is_a_504(quiet_api: Api) -> None:
    reply = ask(quiet_api, "400")
    assert (reply.status_code, reply.json()["error"]) == (504, exceeded(400))


def test_an_answer_that_is_complete_in_time_is_given(
    quiet_api: Api, scripted: ScriptedWorker, posts: ThreadPoolExecutor
) -> None:
    reply = posts.submit(ask, quiet_api, "60000")
    scripted.finish(scripted.take(), 0, [5, 6])
    assert reply.result().json()["usage"]["completion_tokens"] == 2


def test_a_deadline_passes_over_a_preempt(quiet_api: Api, scripted: ScriptedWorker) -> None:
    client = Listener(quiet_api.url, COMPLETIONS, body(deadline_ms=1_500))
    first = scripted.take()
    scripted.emit(first, 0, [10])
    until(lambda: client.ids == [10])
    scripted.preempt(first)
    second = scripted.take()
    assert (second.epoch, second.deadline_ms) == (2, first.deadline_ms)
    assert client.end().error == exceeded(1_500)


# When others are dead, or away.


def test_when_the_api_process_is_dead_the_workers_end_the_job_and_free_its_kv(
    shared_server: Server, null_folder: Path
) -> None:
    with fleet(shared_server.settings(), null_folder) as found:
        api = found.api()
        for role in (Role.PREFILL, Role.DECODE):
            found.worker(role, null=NullModel(step_ms=5))
        until_ready(api.url)
        client = Listener(api.url, COMPLETIONS, body(max_tokens=4_000, deadline_ms=2_500))
        until(lambda: len(client.ids) > 3)
        api.kill()
        queue = SyncQueue(found.queue)
        (key,) = queue.redis.keys(queue.keys.job("*"))
        until(lambda: queue.redis.hget(key, "st") == b"done", 10)
        reason, dl, end = (text(value) for value in queue.redis.hmget(key, "fin", "dl", "end"))
        assert reason == "deadline"
        assert 0 <= int(end) - int(dl) < 4_000
        beats = [raw for raw in map(queue.redis.get, queue.redis.keys(queue.keys.worker("*"))) if raw]
        assert len(beats) == 2
        until(lambda: _all_free(queue), 5)
        queue.close()
        with pytest.raises(httpx.HTTPError):
            client.end()


def _all_free(queue: SyncQueue) -> bool:
    kvs = [orjson.loads(raw)["kv"] for raw in map(queue.redis.get, queue.redis.keys(queue.keys.worker("*"))) if raw]
    return len(kvs) == 2 and all(kv["free"] + kv["cached"] == kv["total"] for kv in kvs)


def test_when_redis_says_nothing_the_client_is_told_in_time_all_the_same(own_server: Server, null_folder: Path) -> None:
    with fleet(own_server.settings(), null_folder) as found, ThreadPoolExecutor(1) as posts:
        api = found.api()
        queue = SyncQueue(found.queue)
        began = time.monotonic()
        reply = posts.submit(ask, api, "1500")
        until(lambda: queue.redis.keys(queue.keys.job("*")))
        os.kill(own_server.pid, signal.SIGSTOP)
        try:
            answer = reply.result(10)
            assert (answer.status_code, answer.json()["error"]) == (504, exceeded(1_500))
            assert 1.5 <= time.monotonic() - began < 5
        finally:
            os.kill(own_server.pid, signal.SIGCONT)
        (key,) = queue.redis.keys(queue.keys.job("*"))
        until(lambda: queue.redis.hget(key, "st") == b"done")  # by the deadline, or by the cancel of who went
        queue.close()


def test_a_job_that_redis_lost_comes_back_with_the_deadline_that_it_had(own_server: Server, null_folder: Path) -> None:
    with fleet(own_server.settings(), null_folder) as found, ThreadPoolExecutor(1) as posts:
        api = found.api()
        queue = SyncQueue(found.queue)
        reply = posts.submit(ask, api, "8000")
        until(lambda: queue.redis.keys(queue.keys.job("*")))
        (key,) = queue.redis.keys(queue.keys.job("*"))
        before = int(queue.redis.hget(key, "dl") or 0)
        asyncio.run(asyncio.sleep(1.5))  # time goes by: a deadline that began anew would be so much later
        own_server.client.flushall()
        until(lambda: queue.redis.hget(key, "ep") == b"2", 10)
        assert abs(int(queue.redis.hget(key, "dl") or 0) - before) < 700
        answer = reply.result(20)
        assert (answer.status_code, answer.json()["error"]) == (504, exceeded(8_000))
        assert int(queue.redis.hget(key, "end") or 0) - before < 3_000
        queue.close()


def test_a_client_that_leaves_takes_its_deadline_along(new_fleet: Fleet) -> None:
    api = new_fleet.api()
    queue = SyncQueue(new_fleet.queue)
    with httpx.Client(timeout=0.5) as client, pytest.raises(httpx.ReadTimeout):
        client.post(api.url + COMPLETIONS, json=body(deadline_ms=60_000))
    until(lambda: queue.redis.keys(queue.keys.job("*")) and not queue.redis.exists(queue.keys.deadlines))
    queue.close()
