"""No body makes the server fail: valid requests with a part replaced, wrong nesting, bytes at random.

Answered by real processes: whatever is right by chance runs, and must end and leave nothing.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from prelay_text.parameters import Route, parameters_of
from tests.bed.processes import Api
from tests.integration.fuzzed import target

__all__ = ["target"]

COMPLETIONS, CHAT, TOKENIZE, DETOKENIZE = "/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"

#: One right body for each path, with every kind of value in it.
VALID: dict[str, dict[str, Any]] = {
    COMPLETIONS: {
        "model": "null", "prompt": "t1 t2", "max_tokens": 3, "n": 2, "temperature": 0.5, "top_p": 0.9, "top_k": 5,
        "seed": 7, "stop": ["t9"], "stop_token_ids": [9], "logit_bias": {"5": -1}, "logprobs": 2, "stream": False,
        "stream_options": {"include_usage": True}, "user": "u", "metadata": {"k": "v"}, "priority": "normal",
    },
    CHAT: {
        "model": "null", "max_tokens": 3, "temperature": 0, "logprobs": True, "top_logprobs": 2, "stream": True,
        "messages": [
            {"role": "system", "content": "t1"},
            {"role": "user", "content": [{"type": "text", "text": "t2"}], "name": "n"},
        ],
        "stream_options": {"include_usage": True}, "bad_words": ["t5"], "min_p": 0.1, "service_tier": "auto",
    },
    TOKENIZE: {"model": "null", "prompt": "t1 t2", "add_special_tokens": True, "return_token_strs": True},
    DETOKENIZE: {"model": "null", "tokens": [1, 2]},
}  # fmt: skip

#: Codes of refusals that are about the body as a whole, and so about no parameter.
_WHOLE = {"invalid_json", "invalid_type", "request_too_large", "unsupported_media_type"}


@pytest.fixture(scope="module")
def client(target: Api) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=target.url, verify=False, timeout=20) as found:
        yield found


def check(client: httpx.Client, path: str, raw: bytes, *, json_type: bool = True) -> httpx.Response:
    """Send, and hold the answer to what every answer keeps."""
    headers = {"content-type": "application/json"} if json_type else {}
    answer = client.post(path, content=raw, headers=headers)
    if answer.status_code == 200:
        if answer.headers["content-type"].startswith("text/event-stream"):
            assert answer.text.endswith("data: [DONE]\n\n")
            assert "internal_error" not in answer.text
        else:
            answer.json()
        return answer
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    if error["code"] == "deadline_exceeded":  # one of a millisecond, say: that is no failure of the server
        assert answer.status_code == 504
        return answer
    assert 400 <= answer.status_code < 500, (answer.status_code, answer.text[:500])
    assert error["type"] == "invalid_request_error"
    assert error["message"]
    assert len(error["message"]) < 2_000
    assert error["param"] is not None or error["code"] in _WHOLE, error
    return answer


def encode(value: Any) -> bytes:
    """As loosely as json does: NaN, huge integers and half characters all come out."""
    return json.dumps(value).encode("utf-8", "surrogatepass")


_NAMES = sorted({name for route in (Route.COMPLETION, Route.CHAT) for name in parameters_of(route)})
_scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.sampled_from([0, -1, 1, 2**31, 2**53, 2**63 - 1, 2**63, 2**64, 10**30, -(2**63) - 1])
    | st.floats()
    | st.text(max_size=12)
    | st.sampled_from(["", "t1", "null", "auto", "\0", "\ud800", "\U0001f600", "<eos>", "a" * 600])
)
_json = st.recursive(
    _scalars,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.text(max_size=6) | st.sampled_from(["role", "content", "type", "text", "5"]), inner, max_size=3
        )
    ),
    max_leaves=8,
)


def places(value: Any) -> Iterator[tuple[Any, ...]]:
    """The way to every part of a value, the whole among them."""
    yield ()
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        for rest in places(inner):
            yield (key, *rest)


def replaced(value: Any, place: tuple[Any, ...], new: Any) -> Any:
    if not place:
        return new
    copy = dict(value) if isinstance(value, dict) else list(value)
    copy[place[0]] = replaced(copy[place[0]], place[1:], new)
    return copy


@st.composite
def _spoilt(draw: st.DrawFn) -> tuple[str, Any]:
    """A right body with one part replaced by any JSON, or wrapped once more, or with one thing added."""
    path = draw(st.sampled_from(sorted(VALID)))
    body = VALID[path]
    place = draw(st.sampled_from(list(places(body))))
    old = body
    for key in place:
        old = old[key]
    kind = draw(st.sampled_from(["any", "wrapped", "added", "missing"]))
    if kind == "added":
        return path, {**body, draw(st.sampled_from(_NAMES) | st.text(max_size=9)): draw(_json)}
    if kind == "missing" and place and isinstance(place[0], str):
        return path, {name: value for name, value in body.items() if name != place[0]}
    new = draw(st.sampled_from([[old], {"x": old}, [[old]]])) if kind == "wrapped" else draw(_json)
    return path, replaced(body, place, new)


def examples(count: int) -> settings:
    return settings(max_examples=count, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@pytest.mark.parametrize("path", sorted(VALID))
def test_the_right_bodies_are_right(client: httpx.Client, path: str) -> None:
    assert check(client, path, encode(VALID[path])).status_code == 200


@given(case=_spoilt())
@examples(400)
def test_a_body_with_one_thing_wrong_is_answered_or_refused_by_name(
    client: httpx.Client, case: tuple[str, Any]
) -> None:
    path, body = case
    check(client, path, encode(body))


@pytest.mark.slow
@pytest.mark.timeout(600)
@given(case=_spoilt())
@examples(8_000)
def test_thousands_of_bodies_with_one_thing_wrong(client: httpx.Client, case: tuple[str, Any]) -> None:
    path, body = case
    check(client, path, encode(body))


@given(
    path=st.sampled_from(sorted(VALID)),
    body=st.dictionaries(st.sampled_from(_NAMES) | st.text(max_size=6), _json, max_size=6) | _json,
)
@examples(200)
def test_any_json_is_answered_or_refused_by_name(client: httpx.Client, path: str, body: Any) -> None:
    check(client, path, encode(body))


@given(path=st.sampled_from(sorted(VALID)), raw=st.binary(max_size=60), json_type=st.booleans())
@examples(100)
def test_any_bytes_are_answered(client: httpx.Client, path: str, raw: bytes, json_type: bool) -> None:
    check(client, path, raw, json_type=json_type)


@given(path=st.sampled_from(sorted(VALID)), data=st.data())
@examples(150)
def test_a_right_body_with_bytes_changed_is_answered(client: httpx.Client, path: str, data: st.DataObject) -> None:
    raw = bytearray(encode(VALID[path]))
    for _ in range(data.draw(st.integers(1, 3))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    check(client, path, bytes(raw[: data.draw(st.integers(1, len(raw)))]))


@given(depth=st.integers(1, 1100), opening=st.sampled_from([b"[", b'{"a":']), name=st.sampled_from(_NAMES))
@examples(60)
def test_any_depth_is_answered(client: httpx.Client, depth: int, opening: bytes, name: str) -> None:
    closing = b"]" if opening == b"[" else b"}"
    deep = opening * depth + b"1" + closing * depth
    path = CHAT if name in parameters_of(Route.CHAT) else COMPLETIONS
    body = encode({key: value for key, value in VALID[path].items() if key != name})
    check(client, path, body[:-1] + b', "%b": %b}' % (name.encode(), deep))


def test_after_all_of_it_a_right_request_is_served(client: httpx.Client) -> None:
    answer = check(client, COMPLETIONS, encode(VALID[COMPLETIONS]))
    assert [choice["finish_reason"] for choice in answer.json()["choices"]] == ["length", "length"]
