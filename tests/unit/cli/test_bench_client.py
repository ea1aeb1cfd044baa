"""How a stream becomes a sample: frames over reads, times, usage, and every way to end badly."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prelay.bench.client import Manner, events, read_stream
from prelay.bench.figures import Sample
from prelay.bench.workload import Ask

ASK = Ask([1, 2], 3)


def text(words: str, finish: str | None = None) -> dict[str, Any]:
    return {"choices": [{"text": words, "finish_reason": finish}], "usage": None}


def usage(tokens: int) -> dict[str, Any]:
    return {"choices": [], "usage": {"prompt_tokens": 2, "completion_tokens": tokens}}


ANSWER = [text("a"), text("b"), text("c"), text("", "length"), usage(3)]


def read(*frames: dict[str, Any], exact: bool = True, done: bool = True) -> Sample:
    """A frame each second, the first after one."""
    found = [(float(at), json.dumps(frame).encode()) for at, frame in enumerate(frames, 1)]
    return read_stream([*found, *([(99.0, b"[DONE]")] if done else [])], ASK, 0.5, exact=exact)


def test_times_are_of_the_first_text_and_of_the_answer_s_last_frame() -> None:
    found = read(*ANSWER)
    assert found == Sample(0.5, "", 1.0, 4.0, 2, 3, 0, [1.0, 1.0], False)
    assert found.tpot == 1.5


def test_tokens_that_the_server_had_in_a_cache_are_told() -> None:
    told = usage(3)
    told["usage"]["prompt_tokens_details"] = {"cached_tokens": 1}
    assert read(*ANSWER[:-1], told).tokens_cached == 1
    told["usage"]["prompt_tokens_details"] = None
    assert read(*ANSWER[:-1], told).tokens_cached == 0


def test_a_frame_with_several_tokens_is_one_gap_and_tokens_come_from_usage() -> None:
    found = read(text("a b"), text("c", "length"), usage(3))
    assert (found.tokens_out, found.gaps, found.tpot) == (3, [1.0], 0.5)


def test_frames_without_text_before_the_first_token_are_not_the_first_token() -> None:
    assert read(text(""), *ANSWER).ttft == 2.0


def test_a_server_that_tells_no_usage_is_counted_by_frames() -> None:
    found = read(*ANSWER[:-1])
    assert found.ok
    assert (found.tokens_in, found.tokens_out, found.counted_by_frames) == (0, 3, True)


@pytest.mark.parametrize(
    ("frames", "words"),
    [
        ([], "the stream ended before its finish reason"),
        ([text("a")], "the stream ended before its finish reason"),
        ([text("a"), {"error": {"message": "no worker", "code": "gone"}}], "error event: no worker"),
        ([text("a"), {"error": "broken"}], "error event: broken"),
        ([text("a", "stop"), usage(1)], "ended by stop with another number of tokens than asked for"),
    ],
)
def test_every_bad_end_has_its_reason(frames: list[dict[str, Any]], words: str) -> None:
    assert read(*frames).why == words
    assert read(*frames, done=False).why == words


def test_an_answer_may_be_shorter_where_its_length_was_not_forced() -> None:
    assert read(text("a", "stop"), usage(1), exact=False).ok


def test_what_is_not_json_is_shown() -> None:
    assert "a frame is not JSON: b'{oops'" in read_stream([(1.0, b"{oops")], ASK, 0, exact=True).why


@given(st.lists(st.binary(max_size=9).filter(lambda data: not set(data) & set(b"\r\n"))), st.data())
def test_frames_are_the_same_however_the_reads_cut_them(payloads: list[bytes], data: st.DataObject) -> None:
    raw = b"".join(b": note\r\nid: 1-2\ndata: " + payload + b"\n\n" for payload in payloads)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(raw)))))
    reads = [(float(n), raw[a:b]) for n, (a, b) in enumerate(zip([0, *cuts], [*cuts, len(raw)], strict=True))]
    found = list(events(reads))
    assert [payload for _, payload in found] == [payload.strip() for payload in payloads]
    assert [at for at, _ in found] == sorted(at for at, _ in found)


def test_carriage_returns_and_missing_spaces_are_read_as_well() -> None:
    assert list(events([(1.0, b"data:x\r\n\r\n"), (2.0, b"data: y\n\n")])) == [(1.0, b"x"), (2.0, b"y")]


def test_only_prelay_s_own_parameter_can_be_left_out() -> None:
    plain = Manner("m", ignore_eos=False).body(ASK)
    assert "ignore_eos" not in plain
    assert Manner("m").body(ASK) == plain | {"ignore_eos": True}
    assert (plain["prompt"], plain["max_tokens"], plain["stream"]) == ([1, 2], 3, True)
