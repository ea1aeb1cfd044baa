"""Lines of a batch file: what is run, what is refused and in which words, and what is written."""

from __future__ import annotations

import codecs
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prelay_text.batch_line import (
    ENDPOINTS,
    BatchRequest,
    Refusal,
    answer_line,
    custom_id_of,
    doubled,
    is_blank,
    read_line,
    refusal_line,
)
from prelay_text.request import ChatRequest, CompletionRequest

COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"
BODY = {"model": "m", "prompt": "p"}
LINE: dict[str, Any] = {"custom_id": "a", "method": "POST", "url": COMPLETIONS, "body": BODY}
BATCH = "batch_" + "0" * 24


def read(line: object, endpoint: str = COMPLETIONS) -> BatchRequest | Refusal:
    return read_line(orjson.dumps(line), endpoint)


def refusal(line: object, endpoint: str = COMPLETIONS) -> Refusal:
    found = read(line, endpoint)
    assert isinstance(found, Refusal), found
    return found


def test_a_line_of_each_endpoint_becomes_its_request() -> None:
    completion = read(LINE)
    chat = read({**LINE, "url": CHATS, "body": {"model": "m", "messages": [{"role": "user", "content": "x"}]}}, CHATS)
    assert isinstance(completion, BatchRequest)
    assert isinstance(completion.request, CompletionRequest)
    assert (completion.custom_id, completion.request.prompts) == ("a", ("p",))
    assert isinstance(chat, BatchRequest)
    assert isinstance(chat.request, ChatRequest)


@pytest.mark.parametrize("end", [b"", b"\n", b"\r\n", b"  \r\n"])
@pytest.mark.parametrize("begin", [b"", b" ", codecs.BOM_UTF8])
def test_line_breaks_and_a_byte_order_mark_are_no_part_of_a_line(begin: bytes, end: bytes) -> None:
    assert isinstance(read_line(begin + orjson.dumps(LINE) + end, COMPLETIONS), BatchRequest)


@pytest.mark.parametrize("raw", [b"", b"\n", b"\r\n", b" \t\r\n", codecs.BOM_UTF8 + b"\r\n"])
def test_lines_with_nothing_in_them_are_blank(raw: bytes) -> None:
    assert is_blank(raw)


def test_a_line_with_anything_in_it_is_not_blank() -> None:
    assert not is_blank(b"{\n")


@pytest.mark.parametrize(
    ("raw", "code", "words"),
    [
        (b"{", "invalid_json", "not valid JSON"),
        (b'{"custom_id": "\xff"}', "invalid_json", "not valid JSON"),
        (orjson.dumps(LINE)[:-1] + b"}}", "invalid_json", "not valid JSON"),
        (b'"custom_id"', "invalid_line", "not str 'custom_id'"),
        (b"null", "invalid_line", "not null"),
        (orjson.dumps([LINE]), "invalid_line", "must be a JSON object, not list"),
    ],
)
def test_what_is_no_object_is_refused_without_an_id(raw: bytes, code: str, words: str) -> None:
    found = read_line(raw, COMPLETIONS)
    assert isinstance(found, Refusal)
    assert (found.custom_id, found.status, found.code) == (None, 0, code)
    assert words in found.message
    assert custom_id_of(raw) is None


@pytest.mark.parametrize(
    ("changes", "code", "words"),
    [
        ({"custom_id": None}, "missing_custom_id", "custom_id is missing"),
        ({"custom_id": 7}, "invalid_custom_id", "a string of 1 to 512 characters, not 7"),
        ({"custom_id": ""}, "invalid_custom_id", "not '' of 0 characters"),
        ({"custom_id": "x" * 513}, "invalid_custom_id", "of 513 characters"),
        ({"method": "GET"}, "invalid_method", "method must be 'POST' in this batch, but it is 'GET'"),
        ({"method": None}, "invalid_method", "but it is missing"),
        ({"url": CHATS}, "invalid_url", f"url must be '{COMPLETIONS}' in this batch, but it is '{CHATS}'"),
        ({"url": None}, "invalid_url", "but it is missing"),
        ({"body": None}, "invalid_body", "body must be a JSON object, but it is missing"),
        ({"body": [1]}, "invalid_body", "but it is list [1]"),
        ({"boddy": {}}, "unknown_field", "'boddy' is not a field of a line"),
    ],
)
def test_a_line_that_is_no_request_is_refused_by_the_name_of_its_field(
    changes: dict[str, Any], code: str, words: str
) -> None:
    found = refusal({**LINE, **changes})
    assert (found.code, found.status) == (code, 0)
    assert words in found.message
    assert found.custom_id == (None if "custom_id" in changes else "a")


@pytest.mark.parametrize(
    ("changes", "param", "code"),
    [
        ({"stream": True}, "stream", "invalid_value"),
        ({"max_tokens": -1}, "max_tokens", "invalid_value"),
        ({"prompt": None}, "prompt", "invalid_type"),
        ({"nonsense": 1}, "nonsense", "unknown_parameter"),
        ({"suffix": "x"}, "suffix", "unsupported_parameter"),
    ],
)
def test_a_body_is_refused_as_the_server_refuses_it(changes: dict[str, Any], param: str, code: str) -> None:
    found = refusal({**LINE, "body": {**BODY, **changes}})
    assert (found.custom_id, found.status, found.param, found.code) == ("a", 400, param, code)
    assert orjson.loads(found.body)["error"]["message"] == found.message


def test_stream_false_asks_for_what_happens_anyway() -> None:
    assert isinstance(read({**LINE, "body": {**BODY, "stream": False}}), BatchRequest)


def test_an_output_line_holds_the_body_as_it_is() -> None:
    raw = answer_line(BATCH, 7, "a\n", f"{BATCH}-7-0", b'{"x": 1.10}')
    assert (
        raw
        == (
            f'{{"id":"batch_req_{"0" * 24}_7","custom_id":"a\\n","response":{{"status_code":200,'
            f'"request_id":"{BATCH}-7-0",'
            '"body":{"x": 1.10}},"error":null}'
        ).encode()
    )


def test_a_refused_request_is_told_with_its_status_and_body() -> None:
    refused = refusal({**LINE, "body": {**BODY, "n": 0}})
    line = orjson.loads(refusal_line(BATCH, 0, refused, f"{BATCH}-0-0"))
    assert (line["custom_id"], line["error"]) == ("a", None)
    assert (line["response"]["status_code"], line["response"]["request_id"]) == (400, f"{BATCH}-0-0")
    assert line["response"]["body"]["error"]["param"] == "n"


def test_a_line_without_an_id_of_its_own_is_told_by_its_number_from_1() -> None:
    for refused in (doubled("a"), refusal([])):
        line = orjson.loads(refusal_line(BATCH, 4, refused, "-"))
        assert (line["custom_id"], line["response"], line["error"]["line"]) == (None, None, 5)
        assert line["id"].endswith("_4")
    line = orjson.loads(refusal_line(BATCH, 4, refusal({**LINE, "url": "x"}), "-"))
    assert (line["custom_id"], "line" in line["error"]) == ("a", False)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
FIELDS = st.dictionaries(st.sampled_from([*LINE, "x"]), JSON)


@given(line=FIELDS | JSON, endpoint=st.sampled_from(sorted(ENDPOINTS)))
def test_whatever_the_line_it_is_read_or_refused_in_one_written_line(line: Any, endpoint: str) -> None:
    try:
        raw = orjson.dumps(line)
    except (TypeError, ValueError):  # integers beyond 64 bits, half characters
        return
    _check(raw, endpoint)


@given(raw=st.binary(), cut=st.integers(0, 200), endpoint=st.sampled_from(sorted(ENDPOINTS)))
def test_whatever_the_bytes_they_are_read_or_refused_in_one_written_line(raw: bytes, cut: int, endpoint: str) -> None:
    _check(raw, endpoint)
    _check(orjson.dumps(LINE)[:cut] + raw, endpoint)


def _check(raw: bytes, endpoint: str) -> None:
    found = read_line(raw, endpoint)
    assert found.custom_id == custom_id_of(raw)
    if isinstance(found, Refusal):
        written = refusal_line(BATCH, 3, found, "r")
        assert b"\n" not in written
        assert orjson.loads(written)["custom_id"] == found.custom_id
