"""What the API refuses, what it reports, and that no input makes it fail."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prelay_worker.config import NullModel, Role
from tests.bed.chain import Listener
from tests.bed.http import get, post, request
from tests.bed.processes import Api, Fleet, fleet, until, until_ready
from tests.bed.scripted import ScriptedWorker
from tests.bed.servers import Server
from tests.bed.tokenizer import CONTEXT, chat, words

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
SHAPE = {"message", "type", "param", "code"}


def ask(api: Api, body: Any, path: str = COMPLETIONS) -> httpx.Response:
    raw = body if isinstance(body, bytes) else None
    return post(api.url + path, content=raw, json=None if raw is not None else body)


def error_of(reply: httpx.Response) -> dict[str, Any]:
    error: dict[str, Any] = reply.json()["error"]
    assert set(error) == SHAPE
    return error


# --- bad input


@pytest.mark.parametrize("raw", [b"", b"  ", b"{", b"nope", b'{"a":1}{', b"\xff\xfe", b"[" * 100_000, b'{"x": NaN}'])
def test_a_body_that_is_no_json_is_a_400(quiet_api: Api, raw: bytes) -> None:
    reply = ask(quiet_api, raw)
    assert reply.status_code == 400
    assert error_of(reply)["code"] == "invalid_json"


@pytest.mark.parametrize(
    ("body", "status", "param", "words_in_it"),
    [
        ([], 400, None, "JSON object"),
        ({}, 400, "model", "missing"),
        ({"model": "null"}, 400, "prompt", "missing"),
        ({"model": "other", "prompt": "t1"}, 404, "model", "'other'"),
        ({"model": "null", "prompt": ""}, 400, "prompt", "empty"),
        ({"model": "null", "prompt": []}, 400, "prompt", "non-empty"),
        ({"model": "null", "prompt": [5000]}, 400, "prompt", "5000"),
        ({"model": "null", "prompt": [-1]}, 400, "prompt", "-1"),
        ({"model": "null", "prompt": [1.5]}, 400, "prompt[0]", "1.5"),
        ({"model": "null", "prompt": "t1", "max_tokens": -1}, 400, "max_tokens", "-1"),
        ({"model": "null", "prompt": "t1", "max_tokens": 10**6}, 400, "max_tokens", str(CONTEXT)),
        ({"model": "null", "prompt": "t1", "temperature": 3}, 400, "temperature", "from 0 to 2"),
        ({"model": "null", "prompt": "t1", "temperature": True}, 400, "temperature", "True"),
        ({"model": "null", "prompt": "t1", "stream": "yes"}, 400, "stream", "true or false"),
        ({"model": "null", "prompt": "t1", "n": 129}, 400, "n", "from 1 to 128"),
        ({"model": "null", "prompt": "t1", "n": 4, "best_of": 3}, 400, "best_of", "at least n"),
        ({"model": "null", "prompt": "t1", "nonsense": 3}, 400, "nonsense", "not a parameter"),
    ],
)
def test_a_wrong_parameter_is_named_with_its_limit_and_value(
    quiet_api: Api, body: Any, status: int, param: str, words_in_it: str
) -> None:
    reply = ask(quiet_api, body)
    error = error_of(reply)
    assert (reply.status_code, error["param"], error["type"]) == (status, param, "invalid_request_error")
    assert words_in_it in error["message"]


def test_a_prompt_of_the_whole_context_is_refused_and_one_less_is_taken(
    quiet_api: Api, scripted: ScriptedWorker
) -> None:
    for length, fits in ((CONTEXT + 1, False), (CONTEXT, False), (CONTEXT - 1, True)):
        body = {"model": "null", "prompt": [1] * length, "stream": True}
        if fits:
            client = Listener(quiet_api.url, COMPLETIONS, body)
            claim = scripted.take()
            assert claim.spec.sampling.max_tokens == 1  # an absent max_tokens is clamped
            scripted.finish(claim, 0, [1], reason="length")
            client.end()
        else:
            error = error_of(ask(quiet_api, body))
            assert error["code"] == "context_length_exceeded"
            assert str(length) in error["message"]
            assert str(CONTEXT) in error["message"]


def test_a_body_beyond_the_limit_is_a_413_declared_or_not(quiet_api: Api) -> None:
    big = b'{"prompt": "' + b"a" * (8 * 1024 * 1024) + b'"}'
    assert ask(quiet_api, big).status_code == 413
    chunks = post(quiet_api.url + COMPLETIONS, content=(big[i : i + 65536] for i in range(0, len(big), 65536)))
    assert chunks.status_code == 413
    assert error_of(chunks)["code"] == "request_too_large"


def test_a_prompt_of_megabytes_is_refused_while_others_are_served(quiet_api: Api) -> None:
    reply = ask(quiet_api, {"model": "null", "prompt": words([7] * 500_000)})
    assert reply.status_code == 400
    assert "500000 tokens" in error_of(reply)["message"]


def test_an_unknown_path_or_method_is_told_in_the_same_shape(quiet_api: Api) -> None:
    missing = get(f"{quiet_api.url}/v1/nothing")
    assert missing.status_code == 404
    assert "/v1/nothing" in error_of(missing)["message"]
    wrong = get(quiet_api.url + COMPLETIONS)
    assert wrong.status_code == 405
    assert "GET" in error_of(wrong)["message"]
    assert wrong.headers["allow"] == "POST"
    slash = get(f"{quiet_api.url}{COMPLETIONS}/")
    assert slash.status_code == 404
    assert f"{COMPLETIONS}/" in error_of(slash)["message"]


@pytest.mark.parametrize("path", ["/health/live", "/health/ready", "/v1/models", "/v1/nothing"])
def test_a_head_is_answered_as_a_get_without_its_body(quiet_api: Api, path: str) -> None:
    asked, head = get(quiet_api.url + path), httpx.head(quiet_api.url + path)
    assert (head.status_code, head.content) == (asked.status_code, b"")
    assert head.headers["content-type"] == asked.headers["content-type"]


@pytest.fixture(scope="module")
def fuzzed() -> Iterator[httpx.Client]:
    with httpx.Client(verify=False) as client:
        yield client


_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=6,
)
_names = st.sampled_from(
    ["model", "prompt", "messages", "max_tokens", "n", "temperature", "top_p", "top_k", "seed", "stop",
     "stop_token_ids", "ignore_eos", "stream", "stream_options", "user", "metadata", "logit_bias", "tools"]
)  # fmt: skip


@given(st.dictionaries(_names, _values, max_size=5), st.sampled_from([COMPLETIONS, CHAT]))
@settings(max_examples=200, deadline=None)
def test_no_body_makes_the_server_fail(quiet_api: Api, fuzzed: httpx.Client, body: dict[str, Any], path: str) -> None:
    # `max_tokens` far beyond the context: a body that is right by chance is not queued.
    full = {"model": "null", "prompt": "t1", **body, "max_tokens": 10**9}
    if path == CHAT:
        full.setdefault("messages", chat([1]))
        full.pop("prompt", None)
    try:
        raw = orjson.dumps(full, option=orjson.OPT_NON_STR_KEYS)
    except TypeError:
        raw = json.dumps(full).encode("utf-8", "surrogatepass")  # NaN, huge integers, half characters: all come in
    reply = fuzzed.post(quiet_api.url + path, content=raw)
    assert 400 <= reply.status_code < 500, reply.text
    error_of(reply)


# --- limits of the fleet


def test_what_no_pool_can_hold_is_refused_before_it_is_queued(new_fleet: Fleet) -> None:
    api = new_fleet.api()
    new_fleet.worker(Role.PREFILL, blocks=64)
    new_fleet.worker(Role.DECODE, blocks=20)  # 320 tokens
    until_ready(api.url)
    until(lambda: get(f"{api.url}/v1/models").json()["data"][0]["max_model_len"] == 320)
    assert error_of(ask(api, {"model": "null", "prompt": [1] * 320}))["code"] == "context_length_exceeded"
    error = error_of(ask(api, {"model": "null", "prompt": [1] * 300, "max_tokens": 21}))
    assert "321" in error["message"]
    assert "320" in error["message"]
    fitting = ask(api, {"model": "null", "prompt": [1] * 300, "max_tokens": 20})
    assert fitting.status_code == 200
    assert fitting.json()["usage"]["completion_tokens"] == 20


# --- health


def test_ready_needs_both_stages_and_says_what_is_missing(new_fleet: Fleet) -> None:
    api = new_fleet.api()
    ready = f"{api.url}/health/ready"
    assert get(ready).json()["reasons"] == ["no prefill worker", "no decode worker"]
    new_fleet.worker(Role.PREFILL)
    assert get(ready).json()["reasons"] == ["no decode worker"]
    decode = new_fleet.worker(Role.DECODE)
    until_ready(api.url)
    assert get(f"{api.url}/health").json() == {"status": "ready", "reasons": []}
    decode.send(signal.SIGSTOP)
    until(lambda: get(ready).status_code == 503, timeout_s=6)
    assert get(ready).json()["reasons"] == ["no decode worker is ready: of 1, 1 make no progress"]
    assert get(f"{api.url}/health/live").status_code == 200


def test_a_worker_whose_model_loop_hangs_is_not_ready(new_fleet: Fleet) -> None:
    api = new_fleet.api()
    worker = ScriptedWorker(new_fleet.queue)
    for changes, status in (
        ({}, 200),
        ({"progress_ms": 5_000}, 503),
        ({"progress_ms": 0, "state": "loading"}, 503),
        ({"state": "draining"}, 503),
        ({"t": 0}, 503),
    ):
        worker.beat(**changes)
        assert get(f"{api.url}/health/ready").status_code == status, changes
    worker.close()


def test_health_answers_within_a_second_when_redis_hangs(own_server: Server, null_folder: Path) -> None:
    with fleet(own_server.settings(), null_folder) as found:
        api = found.api()
        os.kill(own_server.pid, signal.SIGSTOP)
        try:
            reply = get(f"{api.url}/health", timeout=1.5)
            assert reply.status_code == 503
            assert reply.json()["reasons"] == ["the queue (Redis) does not answer"]
            assert get(f"{api.url}/health/live", timeout=1).status_code == 200
        finally:
            os.kill(own_server.pid, signal.SIGCONT)


# --- a queue that takes no more


def test_a_full_redis_is_a_503_and_serves_again_when_it_is_not(own_server: Server, null_folder: Path) -> None:
    with fleet(own_server.settings(), null_folder) as found:
        api = found.api()
        found.worker(Role.UNIFIED, null=NullModel(step_ms=5))
        until_ready(api.url)
        running = Listener(api.url, COMPLETIONS, {"model": "null", "prompt": [1], "max_tokens": 600})
        until(lambda: len(running.ids) > 3)
        own_server.client.config_set("maxmemory", 1)
        reply = ask(api, {"model": "null", "prompt": [1], "max_tokens": 5})
        assert reply.status_code == 503
        assert error_of(reply)["code"] == "queue_full"
        assert int(reply.headers["retry-after"]) > 0
        for key in own_server.client.keys("*live:*"):
            own_server.client.delete(key)
        until(lambda: api.log.count("listening as") == 2)  # and the API hears on
        assert len(running.end().choices[0].ids) == 600  # what runs drains
        assert get(f"{api.url}/admin/jobs/{running.found.id}").status_code == 200
        own_server.client.config_set("maxmemory", 0)
        again = {"model": "null", "prompt": [1], "max_tokens": 5}
        until(lambda: ask(api, again).status_code == 200)  # the API looks at the memory once a second


# --- the operator


def test_an_operator_sees_a_request_and_its_end(quiet_api: Api, scripted: ScriptedWorker) -> None:
    client = Listener(quiet_api.url, COMPLETIONS, {"model": "null", "prompt": [1, 2, 3], "n": 2, "max_tokens": 9})
    one, other = sorted((scripted.take(), scripted.take()), key=lambda claim: claim.spec.choice)
    scripted.emit(one, 0, [5])
    request = one.id.partition("/")[0]
    url = f"{quiet_api.url}/admin/jobs/{request}"
    first, second = get(url).json()["choices"]
    assert (first["state"], first["epoch"], first["tokens"], first["owner"]) == ("decode", 1, 1, scripted.id)
    assert (first["prompt_tokens"], first["max_tokens"], first["viewers"]) == (3, 9, 1)
    assert second["index"] == 1
    assert second["finish_reason"] is None
    scripted.finish(one, 1, [])
    scripted.finish(other, 0, [])
    assert [choice["finish_reason"] for choice in get(url).json()["choices"]] == ["stop", "stop"]
    assert client.end().id == request


def test_a_preempt_on_demand_asks_the_owner_of_each_choice_that_runs(quiet_api: Api, scripted: ScriptedWorker) -> None:
    scripted.listen()
    client = Listener(quiet_api.url, COMPLETIONS, {"model": "null", "prompt": [1], "n": 2, "max_tokens": 9})
    claim = scripted.take()
    url = f"{quiet_api.url}/admin/jobs/{claim.id.partition('/')[0]}/preempt"
    reply = post(url)
    assert reply.status_code == 202
    told = {choice["index"]: choice for choice in reply.json()["choices"]}
    assert told[claim.spec.choice] == {"index": claim.spec.choice, "state": "decode", "asked": scripted.id}
    waiting = told[1 - claim.spec.choice]
    assert (waiting["state"], waiting["asked"]) == ("queued", None)
    assert scripted.heard() == [{"op": "preempt", "id": claim.id, "ep": 1}]
    scripted.finish(claim, 0, [])
    scripted.finish(scripted.take(), 0, [])
    client.end()
    assert [choice["asked"] for choice in post(url).json()["choices"]] == [None, None]


def test_a_request_that_nobody_knows_is_a_404(quiet_api: Api) -> None:
    for method, path in (("GET", "cmpl-none"), ("POST", "cmpl-none/preempt")):
        reply = request(method, f"{quiet_api.url}/admin/jobs/{path}")
        assert reply.status_code == 404
        assert error_of(reply)["code"] == "request_not_found"


def test_the_api_describes_itself(quiet_api: Api) -> None:
    described = get(f"{quiet_api.url}/openapi.json").json()["paths"]
    for path in (
        COMPLETIONS,
        CHAT,
        "/v1/models",
        "/health/ready",
        "/admin/workers",
        "/admin/jobs/{request_id}/preempt",
    ):
        for operation in described[path].values():
            assert operation["description"]
    schema = described[CHAT]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert {"messages", "temperature", "stop", "stream_options"} <= set(schema["properties"])
    assert schema["required"] == ["model", "messages"]
