"""Bodies that are no JSON, or JSON of the kinds that parsers disagree about."""

from __future__ import annotations

import gzip
import json

import httpx
import pytest

from prelay_api.body import MAX_DEPTH
from tests.bed.http import post
from tests.bed.processes import Api

TOKENIZE = "/tokenize"


def send(api: Api, raw: bytes, path: str = "/v1/completions", **headers: str) -> httpx.Response:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return post(api.url + path, content=raw, headers=named)


def refusal(answer: httpx.Response, status: int, code: str) -> str:
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["type"]) == (status, code, "invalid_request_error")
    return str(error["message"])


@pytest.mark.parametrize(
    ("headers", "words"),
    [
        ({"content_encoding": "gzip"}, "content-encoding is 'gzip'"),
        ({"content_encoding": "br, gzip"}, "content-encoding is 'br, gzip'"),
        ({"content_type": "application/json; charset=latin-1"}, "charset of content-type is 'latin-1'"),
        ({"content_type": 'application/json; charset="UTF-16"'}, "charset of content-type is 'utf-16'"),
    ],
)
def test_an_encoding_that_is_not_read_is_a_415(quiet_api: Api, headers: dict[str, str], words: str) -> None:
    assert words in refusal(send(quiet_api, gzip.compress(b"{}"), **headers), 415, "unsupported_media_type")


@pytest.mark.parametrize(
    "headers",
    [
        {"content_encoding": "identity"},
        {"content_type": "application/json; charset=utf-8"},
        {"content_type": 'application/json;charset="UTF-8"; x=y'},
        {"content_type": "application/x-www-form-urlencoded"},
        {"content_type": "text/plain; charset"},
        {"content_type": "; ;;=;charset"},
    ],
)
def test_json_is_read_whatever_its_type_is_called(quiet_api: Api, headers: dict[str, str]) -> None:
    answer = send(quiet_api, b'{"prompt": "t1 t2"}', TOKENIZE, **headers)
    if headers.get("content_type", "").endswith("charset"):  # a charset without a name is none
        assert answer.status_code in (200, 415)
    else:
        assert answer.json()["tokens"] == [1, 2]


def test_a_byte_order_mark_before_utf_8_is_passed_over(quiet_api: Api) -> None:
    assert send(quiet_api, b'\xef\xbb\xbf{"prompt": "t1"}', TOKENIZE).json()["tokens"] == [1]


@pytest.mark.parametrize("encoding", ["utf-16", "utf-32"])
def test_another_unicode_is_named(quiet_api: Api, encoding: str) -> None:
    message = refusal(send(quiet_api, "{}".encode(encoding)), 400, "invalid_json")
    assert f"is {encoding.upper()}" in message


@pytest.mark.parametrize("opening", [b"[", b'{"a":', b'{"model": [', b'{"model": "null", "prompt": ['])
def test_json_beyond_the_depth_limit_is_a_400_that_names_it(quiet_api: Api, opening: bytes) -> None:
    closing = {b"[": b"]", b"{": b"}"}[opening[:1]]
    for raw in (opening * 5000, opening * (MAX_DEPTH + 1) + b"1" + closing * (MAX_DEPTH + 1), b"[" * 1_000_000):
        message = refusal(send(quiet_api, raw), 400, "invalid_json")
        assert f"{MAX_DEPTH} levels" in message or "not valid JSON" in message
    assert f"{MAX_DEPTH} levels" in refusal(send(quiet_api, b'{"a":' * 5000), 400, "invalid_json")


def test_json_within_the_depth_limit_is_refused_for_what_it_is(quiet_api: Api) -> None:
    deep = b"[" * (MAX_DEPTH - 2) + b"]" * (MAX_DEPTH - 2)
    for name in ("prompt", "messages", "stop", "logit_bias", "metadata", "response_format", "tools", "nonsense"):
        path = "/v1/chat/completions" if name in ("messages", "tools") else "/v1/completions"
        extra = b'"prompt": "t1", ' if name != "prompt" and path == "/v1/completions" else b""
        extra += b'"messages": [{"role": "user", "content": "t1"}], ' if name == "tools" else b""
        answer = send(quiet_api, b'{"model": "null", ' + extra + b'"%b": %b}' % (name.encode(), deep), path)
        assert answer.status_code == 400
        assert answer.json()["error"]["param"].startswith(name)
        assert len(answer.content) < 2_000


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999", "-1e999", "9" * 400, "1" * 5000])
def test_a_number_that_is_not_finite_is_no_json(quiet_api: Api, number: str) -> None:
    raw = f'{{"model": "null", "prompt": "t1", "temperature": {number}}}'
    refusal(send(quiet_api, raw.encode()), 400, "invalid_json")


@pytest.mark.parametrize(
    ("name", "number"),
    [
        ("seed", str(2**64)),
        ("seed", "-9223372036854775809"),
        ("max_tokens", str(2**200)),
        ("max_tokens", "1e2"),
        ("n", "1.0"),
        ("temperature", "1e308"),
        ("logprobs", str(2**63)),
    ],
)
def test_a_number_beyond_its_parameter_is_named(quiet_api: Api, name: str, number: str) -> None:
    raw = f'{{"model": "null", "prompt": "t1", "{name}": {number}}}'
    answer = send(quiet_api, raw.encode())
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == name


def test_of_a_key_that_stands_twice_the_last_value_counts(quiet_api: Api) -> None:
    raw = b'{"prompt": "t1", "return_token_strs": 5, "prompt": "t2", "return_token_strs": true}'
    assert send(quiet_api, raw, TOKENIZE).json()["token_strs"] == ["t2"]


@pytest.mark.parametrize(
    "raw",
    [
        b'{"prompt": "\xff"}',
        b'{"prompt": "\xc0\x80"}',
        b'{"prompt": "\xed\xa0\x80"}',
        b'{"prompt": "\\ud800"}',
        b'{"prompt": "\\udc00\\ud800"}',
        b'{"\\ud800": 1}',
        b'{"prompt": "\x00"}',
        b'{"prompt": "\n"}',
        b'{"prompt": "a}',
        b"{'prompt': 'a'}",
        b'{"prompt": "a",}',
        b'{"prompt": /* */ "a"}',
        b'{"prompt": 01}',
        b'{"prompt": +1}',
        b'{"prompt": .5}',
        b'{"prompt": "\\x41"}',
        b'{"prompt": "a"} {}',
        b"\0",
        b"\x1f\x8b\x08",
    ],
)
def test_what_is_not_strictly_json_is_a_400(quiet_api: Api, raw: bytes) -> None:
    refusal(send(quiet_api, raw), 400, "invalid_json")


def test_characters_that_json_can_write_are_taken(quiet_api: Api) -> None:
    raw = json.dumps({"prompt": "t1 \0\x7f\u2028\ufffe\U0001f600 t2", "return_token_strs": True}).encode()
    tokens = send(quiet_api, raw, TOKENIZE).json()["token_strs"]
    assert (tokens[0], tokens[-1]) == ("t1", "t2")
