"""Answers in OpenAI's shape, as bytes. Pure encoding: sending is the API's work.

A chat stream is, for each choice: one chunk with the role, chunks with content, one with the finish
reason and an empty delta. With `include_usage` every chunk carries `usage: null` and one more, without
choices, carries the usage. Then DONE.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

import orjson

#: The last frame of every stream.
DONE = b"data: [DONE]\n\n"

#: Line breaks (a comment or an id must not end early), and NUL, which makes clients ignore an id.
_BREAKS = str.maketrans(dict.fromkeys("\r\n\0", " "))


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of the whole request: the prompt once, the answers of all choices."""

    prompt_tokens: int
    completion_tokens: int

    def body(self) -> dict[str, int]:
        return {**asdict(self), "total_tokens": self.prompt_tokens + self.completion_tokens}


@dataclass(frozen=True, slots=True)
class Choice:
    """One finished choice. `finish_reason` is "stop" or "length"; other endings are errors, not answers."""

    index: int
    text: str
    finish_reason: str


@dataclass(frozen=True)
class Renderer:
    """Renders the answer to one request; its fields stand in every body of that answer.

    `created` is in Unix seconds. `include_usage` concerns the chunks of a stream only.
    """

    chat: bool
    id: str
    created: int
    model: str
    system_fingerprint: str
    include_usage: bool = False

    def answer(self, choices: Iterable[Choice], usage: Usage) -> bytes:
        """The whole answer in one body, choices in the order of their index."""
        ordered = sorted(choices, key=lambda choice: choice.index)
        shape = _chat_choice if self.chat else _completion_choice
        kind = "chat.completion" if self.chat else "text_completion"
        return self._body(kind, [shape(choice) for choice in ordered], {"usage": usage.body()})

    def role_chunk(self, index: int) -> bytes:
        """The first chunk of a choice of a chat. A completion has none."""
        return self._chunk(index, {"delta": {"role": "assistant", "content": ""}}, None)

    def text_chunk(self, index: int, text: str) -> bytes:
        return self._chunk(index, {"delta": {"content": text}} if self.chat else {"text": text}, None)

    def finish_chunk(self, index: int, finish_reason: str) -> bytes:
        """The last chunk of a choice, without text."""
        return self._chunk(index, {"delta": {}} if self.chat else {"text": ""}, finish_reason)

    def usage_chunk(self, usage: Usage) -> bytes:
        """The last chunk of a stream that was asked to include its usage."""
        return self._body(self._chunk_kind, [], {"usage": usage.body()})

    @property
    def _chunk_kind(self) -> str:
        return "chat.completion.chunk" if self.chat else "text_completion"

    def _chunk(self, index: int, part: dict[str, Any], finish_reason: str | None) -> bytes:
        choice = {"index": index, **part, "logprobs": None, "finish_reason": finish_reason}
        return self._body(self._chunk_kind, [choice], {"usage": None} if self.include_usage else {})

    def _body(self, kind: str, choices: list[dict[str, Any]], rest: dict[str, Any]) -> bytes:
        head = {"id": self.id, "object": kind, "created": self.created, "model": self.model}
        return orjson.dumps({**head, "system_fingerprint": self.system_fingerprint, "choices": choices, **rest})


def _chat_choice(choice: Choice) -> dict[str, Any]:
    message = {"role": "assistant", "content": choice.text, "refusal": None}
    return {"index": choice.index, "message": message, "logprobs": None, "finish_reason": choice.finish_reason}


def _completion_choice(choice: Choice) -> dict[str, Any]:
    return {
        "index": choice.index,
        "text": choice.text,
        "logprobs": None,
        "finish_reason": choice.finish_reason,
    }


def error_body(
    message: str,
    *,
    type: str = "server_error",  # noqa: A002 - the field's name in OpenAI's error body
    param: str | None = None,
    code: str | None = None,
) -> bytes:
    """OpenAI's error object: the body of an error answer, or the data of a frame in a stream that fails."""
    return orjson.dumps({"error": {"message": message, "type": type, "param": param, "code": code}})


def frame(cursor: str | None, data: bytes) -> bytes:
    """One server-sent event; `cursor` is what a client sends back as Last-Event-ID. `data` holds no line break."""
    head = b"" if cursor is None else b"id: " + cursor.translate(_BREAKS).encode() + b"\n"
    return head + b"data: " + data + b"\n\n"


def comment(text: str) -> bytes:
    """A line that keeps the connection alive. Put as many as needed in front of the next frame.

    It ends in one line break: with a second one, clients that have seen an id would take it for an
    event without data and fail to parse it.
    """
    return b": " + text.translate(_BREAKS).encode() + b"\n"
