from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import orjson
import pytest
from openai._streaming import ServerSentEvent, SSEDecoder
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from prelay_text.render import (
    DONE,
    Choice,
    Part,
    Renderer,
    Usage,
    comment,
    error_body,
    frame,
)


def renderer(chat: bool, include_usage: bool = False) -> Renderer:
    return Renderer(
        chat=chat, id="req-1", created=1_700_000_000, model="m", system_fingerprint="fp", include_usage=include_usage
    )


def events(stream: bytes) -> list[ServerSentEvent]:
    """What the official client makes of the bytes, one byte at a time."""
    return list(SSEDecoder().iter_bytes(bytes([byte]) for byte in stream))


def bodies(frames: Iterable[bytes]) -> list[dict[str, Any]]:
    return [orjson.loads(body) for body in frames]


def test_a_chat_answer_is_read_by_the_official_client() -> None:
    choices = [Choice(1, Part("b"), "length"), Choice(0, Part("aé"), "stop")]
    body = renderer(chat=True).answer(choices, Usage(3, 7))
    answer = ChatCompletion.model_validate_json(body, strict=True)
    assert (answer.id, answer.created, answer.model, answer.system_fingerprint) == ("req-1", 1_700_000_000, "m", "fp")
    assert [(c.index, c.message.role, c.message.content, c.finish_reason) for c in answer.choices] == [
        (0, "assistant", "aé", "stop"),
        (1, "assistant", "b", "length"),
    ]
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (3, 7, 10)


def test_a_completion_answer_is_read_by_the_official_client() -> None:
    answer = Completion.model_validate_json(
        renderer(chat=False).answer([Choice(0, Part("a"), "stop")], Usage(3, 7)), strict=True
    )
    assert (answer.object, answer.choices[0].text, answer.choices[0].finish_reason) == ("text_completion", "a", "stop")
    assert answer.usage is not None
    assert answer.usage.total_tokens == 10


def test_the_chunks_of_a_chat_are_read_by_the_official_client() -> None:
    r = renderer(chat=True)
    first = r.first_chunk(2, (1, 2))
    assert first is not None
    raw = [first, r.text_chunk(2, Part("é\n")), r.finish_chunk(2, "stop", Part(""))]
    chunks = [ChatCompletionChunk.model_validate_json(body, strict=True) for body in raw]
    assert [chunk.choices[0].index for chunk in chunks] == [2, 2, 2]
    assert [chunk.choices[0].delta.role for chunk in chunks] == ["assistant", None, None]
    assert [chunk.choices[0].delta.content for chunk in chunks] == ["", "é\n", None]
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None, None, "stop"]
    assert bodies(raw)[2]["choices"][0]["delta"] == {}
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}


def test_the_chunks_of_a_completion_are_read_by_the_official_client() -> None:
    r = renderer(chat=False)
    raw = [r.text_chunk(0, Part("a")), r.finish_chunk(0, "length", Part(""))]
    # The client's model says finish_reason is never null, the API sends null until the end: not strict
    assert [(body["object"], body["choices"][0]["text"]) for body in bodies(raw)] == [
        ("text_completion", "a"),
        ("text_completion", ""),
    ]
    assert [body["choices"][0]["finish_reason"] for body in bodies(raw)] == [None, "length"]


@pytest.mark.parametrize("chat", [True, False])
def test_usage_comes_in_a_chunk_of_its_own_and_only_when_asked_for(chat: bool) -> None:
    asked, plain = renderer(chat, include_usage=True), renderer(chat)
    for chunk in bodies([asked.text_chunk(0, Part("a")), asked.finish_chunk(0, "stop", Part(""))]):
        assert chunk["usage"] is None
    for chunk in bodies([plain.text_chunk(0, Part("a")), plain.finish_chunk(0, "stop", Part(""))]):
        assert "usage" not in chunk
    (last,) = bodies([asked.usage_chunk(Usage(5, 9, 3))])
    assert last["choices"] == []
    assert last["usage"] == {
        "prompt_tokens": 5,
        "completion_tokens": 9,
        "total_tokens": 14,
        "prompt_tokens_details": {"cached_tokens": 3},
    }
    (whole,) = bodies([plain.answer([Choice(0, Part("a"), "stop")], Usage(5, 9, 3))])
    assert whole["usage"] == last["usage"]


def test_frames_give_the_client_one_event_each_with_its_cursor() -> None:
    stream = frame("1-0", b'{"a":1}') + frame("1-1,2-4", b'{"b":2}') + frame(None, b"{}") + DONE
    found = events(stream)
    assert [event.data for event in found] == ['{"a":1}', '{"b":2}', "{}", "[DONE]"]
    assert [event.id for event in found] == ["1-0", "1-1,2-4", "1-1,2-4", "1-1,2-4"]


def test_a_comment_rides_in_front_of_the_next_frame_and_makes_no_event() -> None:
    stream = frame("1-0", b"{}") + comment("waiting") + comment("two\nlines\r\n") + frame("1-1", b"{}") + comment("end")
    assert [(event.id, event.data) for event in events(stream)] == [("1-0", "{}"), ("1-1", "{}")]
    assert comment("x").endswith(b"x\n")
    assert b"\n\n" not in comment("a\n\nb")


def test_text_of_any_kind_stays_in_one_event() -> None:
    text = "line\nbreak\r\n\r\u2028 data: id: \0 é 😀"
    (event,) = events(frame("1-0", renderer(chat=False).text_chunk(0, Part(text))))
    assert event.json()["choices"][0]["text"] == text


def test_a_cursor_cannot_break_out_of_its_line() -> None:
    (event,) = events(frame("1\ndata: x\0", b"{}"))
    assert (event.id, event.data) == ("1 data: x ", "{}")


def test_errors_have_the_shape_of_openai() -> None:
    asked = error_body("n must be 1", type="invalid_request_error", param="n", code="invalid_value")
    assert orjson.loads(asked) == {
        "error": {"message": "n must be 1", "type": "invalid_request_error", "param": "n", "code": "invalid_value"}
    }
    assert orjson.loads(error_body("gone", code="lost")) == {
        "error": {"message": "gone", "type": "server_error", "param": None, "code": "lost"}
    }
