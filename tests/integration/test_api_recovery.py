"""Preempts, step by step: a scripted worker says what happens, and the client's side is watched."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from prelay_api.routes.streams import ANSWER_S
from prelay_queue.job import FinishReason
from prelay_queue.state import State
from tests.bed.chain import Listener, check_cursors, usage
from tests.bed.http import post, request
from tests.bed.processes import Api, Fleet, fleet, until
from tests.bed.scripted import ScriptedWorker
from tests.bed.servers import Server
from tests.bed.tokenizer import chat, ids_of

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


def body(**more: Any) -> dict[str, Any]:
    return {"model": "null", "prompt": [1, 2], "max_tokens": 50, **more}


@pytest.fixture
def posts() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as pool:
        yield pool


def seen(listener: Listener, *ids: int) -> None:
    """Wait until the client has exactly these ids."""
    until(lambda: listener.ids == list(ids))


def test_a_preempted_stream_goes_on_where_the_client_is(quiet_api: Api, scripted: ScriptedWorker) -> None:
    client = Listener(quiet_api.url, COMPLETIONS, body())
    first = scripted.take()
    scripted.emit(first, 0, [10, 11, 12])
    seen(client, 10, 11, 12)
    scripted.preempt(first)
    second = scripted.take()
    assert (second.epoch, second.ids) == (2, (10, 11, 12))
    scripted.finish(second, 3, [13, 14])
    found = client.end()
    assert found.choices[0].ids == [10, 11, 12, 13, 14]
    assert found.choices[0].finishes == ["stop"]
    check_cursors(found)
    assert found.frames[-2].id == "2-5"


def test_what_a_lagging_relay_has_not_delivered_is_discarded(new_fleet: Fleet) -> None:
    api = new_fleet.api(faults="relay.deliver=pause:1.5@2")
    worker = ScriptedWorker(new_fleet.queue)
    client = Listener(api.url, COMPLETIONS, body())
    first = worker.take()
    worker.emit(first, 0, [10])
    seen(client, 10)
    worker.emit(first, 1, [11])  # the relay now lags with this one
    worker.emit(first, 2, [12, 13])
    worker.preempt(first)
    second = worker.take()
    assert second.ids == (10,)
    assert worker.state(second.id)["rs:2"] == "1"
    worker.emit(second, 1, [21, 22])
    worker.finish(second, 3, [23])
    assert client.end().choices[0].ids == [10, 21, 22, 23]
    worker.close()


def test_keep_emitted_discards_nothing(new_fleet: Fleet) -> None:
    api = new_fleet.api(faults="relay.deliver=pause:1.0@2", keep="emitted")
    worker = ScriptedWorker(new_fleet.queue)
    client = Listener(api.url, COMPLETIONS, body())
    first = worker.take()
    worker.emit(first, 0, [10])
    seen(client, 10)
    worker.emit(first, 1, [11, 12])
    worker.preempt(first)
    second = worker.take()
    assert second.ids == (10, 11, 12)
    worker.finish(second, 3, [13])
    assert client.end().choices[0].ids == [10, 11, 12, 13]
    worker.close()


def test_text_held_back_for_a_stop_string_is_not_delivered_and_may_be_discarded(
    quiet_api: Api, scripted: ScriptedWorker
) -> None:
    client = Listener(quiet_api.url, COMPLETIONS, body(stop=[" t11 t12 t99"]))
    first = scripted.take()
    scripted.emit(first, 0, [10, 11, 12])
    seen(client, 10)
    scripted.preempt(first)
    second = scripted.take()
    assert second.ids == (10,)
    scripted.finish(second, 1, [31, 32])
    assert client.end().choices[0].ids == [10, 31, 32]


def test_a_preempt_before_the_first_token_restarts_from_scratch(quiet_api: Api, scripted: ScriptedWorker) -> None:
    client = Listener(quiet_api.url, CHAT, {"model": "null", "messages": chat([1])})
    scripted.preempt(scripted.take())
    second = scripted.take()
    assert (second.epoch, second.ids) == (2, ())
    scripted.finish(second, 0, [5])
    assert client.end().choices[0].ids == [5]


def test_an_answer_in_one_piece_restarts_from_scratch_and_counts_once(
    quiet_api: Api, scripted: ScriptedWorker, posts: ThreadPoolExecutor
) -> None:
    reply = posts.submit(post, quiet_api.url + COMPLETIONS, json=body())
    first = scripted.take()
    scripted.emit(first, 0, [10, 11, 12])
    scripted.preempt(first)
    second = scripted.take()
    assert (second.epoch, second.ids) == (2, ())
    scripted.finish(second, 0, [20, 21])
    answer = reply.result().json()
    assert ids_of(answer["choices"][0]["text"]) == [20, 21]
    assert answer["usage"] == usage(2, 2)


def test_each_choice_is_preempted_by_itself(quiet_api: Api, scripted: ScriptedWorker) -> None:
    client = Listener(quiet_api.url, COMPLETIONS, body(n=3, stream_options={"include_usage": True}))
    claims = {claim.spec.choice: claim for claim in (scripted.take() for _ in range(3))}
    for index, claim in claims.items():
        scripted.emit(claim, 0, [index, 10 + index])
    until(lambda: all(len(c.ids) == 2 for c in client.found.choices.values()) and len(client.found.choices) == 3)
    scripted.preempt(claims[1])
    second = scripted.take()
    assert second.id == claims[1].id
    scripted.finish(claims[0], 2, [20])
    scripted.finish(second, 2, [21])
    scripted.finish(claims[2], 2, [22], reason=FinishReason.LENGTH)
    found = client.end()
    assert {i: c.ids for i, c in found.choices.items()} == {0: [0, 10, 20], 1: [1, 11, 21], 2: [2, 12, 22]}
    assert {i: c.finishes for i, c in found.choices.items()} == {0: ["stop"], 1: ["stop"], 2: ["length"]}
    check_cursors(found, choices=3)
    assert found.usage is not None
    assert found.usage["completion_tokens"] == 9


def test_three_preempts_in_a_row_leave_one_unbroken_stream(quiet_api: Api, scripted: ScriptedWorker) -> None:
    client = Listener(quiet_api.url, COMPLETIONS, body())
    ids: list[int] = []
    for attempt in range(1, 4):
        claim = scripted.take()
        assert (claim.epoch, list(claim.ids)) == (attempt, ids)
        scripted.emit(claim, len(ids), [attempt, 100 + attempt])
        ids += [attempt, 100 + attempt]
        seen(client, *ids)
        scripted.preempt(claim)
    scripted.finish(scripted.take(), 6, [9])
    found = client.end()
    assert found.choices[0].ids == [*ids, 9]
    check_cursors(found)


def test_a_requeue_whose_answer_is_lost_is_asked_again_and_answers_the_same(new_fleet: Fleet) -> None:
    api = new_fleet.api(faults="requeue=lost, submit=lost, cancel=lost")
    worker = ScriptedWorker(new_fleet.queue)
    client = Listener(api.url, COMPLETIONS, body())
    first = worker.take()
    worker.emit(first, 0, [10])
    seen(client, 10)
    worker.preempt(first)
    second = worker.take()
    assert (second.epoch, second.ids) == (2, (10,))
    worker.finish(second, 1, [11])
    assert client.end().choices[0].ids == [10, 11]
    worker.close()


def test_a_requeue_that_fails_is_found_in_the_log_and_done_again(new_fleet: Fleet) -> None:
    api = new_fleet.api(faults="relay.requeue.before=cut, relay.requeue.after=cut")
    worker = ScriptedWorker(new_fleet.queue)
    client = Listener(api.url, COMPLETIONS, body())
    first = worker.take()
    worker.emit(first, 0, [10, 11])
    seen(client, 10, 11)
    worker.preempt(first)
    second = worker.take()
    assert second.ids == (10, 11)
    worker.emit(second, 2, [12])
    seen(client, 10, 11, 12)
    worker.preempt(second)
    worker.finish(worker.take(), 3, [13])
    assert client.end().choices[0].ids == [10, 11, 12, 13]
    worker.close()


def test_a_sweep_that_requeues_first_keeps_what_was_emitted(new_fleet: Fleet) -> None:
    api = new_fleet.api(faults="relay.deliver=pause:0.5@2, relay.requeue.before=pause:2")
    worker = ScriptedWorker(new_fleet.queue)
    client = Listener(api.url, COMPLETIONS, body())
    first = worker.take()
    worker.emit(first, 0, [10])
    seen(client, 10)
    worker.emit(first, 1, [11, 12])
    worker.preempt(first)
    swept = worker.queue.run(worker.queue.scripts.reap(100, 0, 60_000, 2, "{}"))
    assert swept.requeued == (first.id,)
    second = worker.take()
    assert second.ids == (10, 11, 12)
    worker.emit(second, 3, [13])
    worker.finish(second, 4, [14])
    assert client.end().choices[0].ids == [10, 11, 12, 13, 14]
    worker.close()


def test_live_events_that_are_lost_are_read_from_the_log(new_fleet: Fleet) -> None:
    api = new_fleet.api()
    worker = ScriptedWorker(new_fleet.queue)
    client = Listener(api.url, COMPLETIONS, body())
    claim = worker.take()
    worker.emit(claim, 0, [10])
    seen(client, 10)
    attachments = worker.state(claim.id)["at"]
    worker.queue.redis.hset(worker.queue.keys.job(claim.id), "at", "")  # tells nobody from here on
    worker.emit(claim, 1, [11])
    seen(client, 10, 11)  # found by looking after a silence
    worker.queue.redis.hset(worker.queue.keys.job(claim.id), "at", attachments)
    worker.emit(claim, 2, [12])
    seen(client, 10, 11, 12)
    worker.queue.redis.hset(worker.queue.keys.job(claim.id), "at", "")
    worker.finish(claim, 3, [13])
    assert client.end().choices[0].ids == [10, 11, 12, 13]
    worker.close()


def test_a_preempt_that_nobody_was_told_of_is_answered_after_a_silence(new_fleet: Fleet) -> None:
    api = new_fleet.api()
    worker = ScriptedWorker(new_fleet.queue)
    client = Listener(api.url, COMPLETIONS, body())
    first = worker.take()
    worker.emit(first, 0, [10])
    seen(client, 10)
    attachments = worker.state(first.id)["at"]
    worker.queue.redis.hset(worker.queue.keys.job(first.id), "at", "")
    worker.preempt(first)
    worker.queue.redis.hset(worker.queue.keys.job(first.id), "at", attachments)
    second = worker.take()
    assert second.ids == (10,)
    worker.finish(second, 1, [11])
    assert client.end().choices[0].ids == [10, 11]
    worker.close()


def test_a_job_that_redis_lost_is_submitted_again_with_what_the_client_has(
    own_server: Server, null_folder: Path
) -> None:
    with fleet(own_server.settings(), null_folder) as found:
        api = found.api()
        worker = ScriptedWorker(found.queue)
        client = Listener(api.url, COMPLETIONS, body())
        first = worker.take()
        worker.emit(first, 0, [10, 11])
        seen(client, 10, 11)
        own_server.client.flushall()
        worker = ScriptedWorker(found.queue)
        second = worker.take()
        assert (second.id, second.epoch, second.ids) == (first.id, 2, (10, 11))
        assert second.spec == first.spec
        worker.finish(second, 2, [12])
        assert client.end().choices[0].ids == [10, 11, 12]
        worker.close()


@pytest.mark.parametrize("pause_s", [0.1, 4.0])
def test_a_redis_that_was_killed_and_comes_back_ends_no_stream(
    own_server: Server, null_folder: Path, pause_s: float
) -> None:
    with fleet(own_server.settings(), null_folder) as found:
        api = found.api()
        worker = ScriptedWorker(found.queue)
        client = Listener(api.url, COMPLETIONS, body())
        claim = worker.take()
        worker.emit(claim, 0, [10])
        seen(client, 10)
        own_server.kill()
        if pause_s > 1:
            api.wait_for("lost contact")
            assert post(api.url + COMPLETIONS, json=body()).status_code == 503
        own_server.start()
        worker.emit(claim, 1, [11])
        worker.preempt(claim)
        second = worker.take()
        worker.finish(second, len(second.ids), [12])
        assert client.end().choices[0].ids == [10, *second.ids[1:], 12]
        worker.close()


def test_a_redis_that_forgot_what_was_delivered_ends_the_stream_with_an_error(
    quiet_api: Api, scripted: ScriptedWorker
) -> None:
    client = Listener(quiet_api.url, COMPLETIONS, body())
    claim = scripted.take()
    scripted.emit(claim, 0, [10, 11, 12])
    seen(client, 10, 11, 12)
    # As after a failover to a replica that lacked the last writes, and a worker that then sampled something else.
    redis, keys = scripted.queue.redis, scripted.queue.keys
    for seq in (1, 2):
        redis.xdel(keys.log(claim.id), f"1-{seq}")
    redis.hset(keys.job(claim.id), mapping={"ep": 2, "nx": 1, "rs:2": 1})
    redis.xadd(keys.log(claim.id), {"t": 77}, id="2-1")
    redis.hset(keys.job(claim.id), "nx", 2)
    found = client.end()
    assert found.choices[0].ids == [10, 11, 12]
    assert found.choices[0].finishes == []
    assert found.error is not None
    assert found.error["code"] == "diverged"
    assert found.done
    until(lambda: scripted.state(claim.id)["st"] == State.DONE)


def test_a_master_that_becomes_a_replica_is_a_503_and_is_served_from_as_before(
    own_server: Server, null_folder: Path
) -> None:
    """queue case 13, redis-py#460: the stream that is open goes on, and new requests hear when to try again."""
    with fleet(own_server.settings(), null_folder) as found:
        api = found.api()
        worker = ScriptedWorker(found.queue)
        client = Listener(api.url, COMPLETIONS, body())
        claim = worker.take()
        worker.emit(claim, 0, [10])
        seen(client, 10)
        own_server.client.replicaof("127.0.0.1", "1")
        reply = post(api.url + COMPLETIONS, json=body())
        assert (reply.status_code, reply.json()["error"]["code"]) == (503, "service_unavailable")
        assert int(reply.headers["retry-after"]) > 0
        own_server.client.replicaof("NO", "ONE")
        worker.finish(claim, 1, [11])
        assert client.end().choices[0].ids == [10, 11]
        again = Listener(api.url, COMPLETIONS, body())
        worker.finish(worker.take(), 0, [12])
        assert again.end().choices[0].ids == [12]
        worker.close()


def test_a_cancel_that_redis_does_not_hear_is_a_503_soon(own_server: Server, null_folder: Path) -> None:
    with fleet(own_server.settings(), null_folder) as found:
        api = found.api()
        worker = ScriptedWorker(found.queue)
        client = Listener(api.url, COMPLETIONS, body())
        claim = worker.take()
        worker.emit(claim, 0, [10])
        seen(client, 10)
        own_server.kill(signal.SIGSTOP)
        try:
            began = time.monotonic()
            reply = request("DELETE", f"{api.url}/v1/streams/{client.found.id}")
            assert time.monotonic() - began < ANSWER_S + 3
        finally:
            own_server.kill(signal.SIGCONT)
        error = reply.json()["error"]
        assert (reply.status_code, error["code"]) == (503, "service_unavailable")
        assert f"{ANSWER_S:g} s" in error["message"]
        assert int(reply.headers["retry-after"]) > 0
        until(lambda: request("DELETE", f"{api.url}/v1/streams/{client.found.id}").status_code == 200)
        assert client.end().error is not None
        worker.close()


# --- ends that are no answers


@pytest.mark.parametrize(
    ("reason", "error", "status", "code"),
    [
        ("error", '{"message": "too big", "type": "invalid_request_error", "code": "big", "status": 400}', 400, "big"),
        ("error", "{}", 500, "internal_error"),
        ("error", "no json", 500, "internal_error"),
        ("cancelled", "", 410, "cancelled"),
        ("deadline", "", 504, "deadline_exceeded"),
    ],
)
def test_an_end_that_is_no_answer_is_an_error_event_or_a_status(
    quiet_api: Api,
    scripted: ScriptedWorker,
    posts: ThreadPoolExecutor,
    reason: str,
    error: str,
    status: int,
    code: str,
) -> None:
    client = Listener(quiet_api.url, COMPLETIONS, body())
    claim = scripted.take()
    scripted.emit(claim, 0, [10])
    seen(client, 10)
    scripted.finish(claim, 1, [], reason=reason, error=error)
    found = client.end()
    assert found.error is not None
    assert found.error["code"] == code
    assert found.done
    assert found.choices[0].finishes == []
    reply = posts.submit(post, quiet_api.url + COMPLETIONS, json=body())
    scripted.finish(scripted.take(), 0, [], reason=reason, error=error)
    assert reply.result().status_code == status
    assert reply.result().json()["error"]["code"] == code


def test_one_choice_that_fails_ends_the_request_and_cancels_the_others(
    quiet_api: Api, scripted: ScriptedWorker
) -> None:
    client = Listener(quiet_api.url, COMPLETIONS, body(n=2))
    one, other = scripted.take(), scripted.take()
    scripted.finish(one, 0, [], reason="error", error="{}")
    assert client.end().error is not None
    until(lambda: scripted.state(other.id)["st"] == State.DONE)
    assert scripted.state(other.id)["fin"] == "cancelled"
