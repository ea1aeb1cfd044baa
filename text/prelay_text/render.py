"""Answers in OpenAI's shape, as bytes. Pure encoding: sending is the API's work.

A chat stream is, for each choice: one chunk with the role, chunks with content, one with the finish
reason and an empty delta. With `include_usage` every chunk carries `usage: null` and one more, without
choices, carries the usage. Then DONE.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from .reports import Likely, TokenReport

#: The last frame of every stream.
DONE = b"data: [DONE]\n\n"

#: What is told of some tokens; None when the request did not ask.
Reports = Sequence[TokenReport] | None

#: Line breaks (a comment or an id must not end early), and NUL, which makes clients ignore an id.
_BREAKS = str.maketrans(dict.fromkeys("\r\n\0", " "))


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of the whole request: the prompt once, the answers of all choices."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0  # of the prompt, found in a prefix cache

    def body(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }


@dataclass(frozen=True, slots=True)
class Choice:
    """One finished choice. `finish_reason` is "stop" or "length"; other endings are errors, not answers.

    `reports` has one entry for each token; None when the request asks for no logprobs, as `prompt_logprobs` is then.
    """

    index: int
    text: str
    finish_reason: str
    reports: Reports = None
    prompt_logprobs: list[Any] | None = None


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
        shape = self._chat_choice if self.chat else self._completion_choice
        kind = "chat.completion" if self.chat else "text_completion"
        prompt = ordered[0].prompt_logprobs if self.chat else None  # vLLM's place for a chat's
        rest = {"usage": usage.body()} | ({} if prompt is None else {"prompt_logprobs": prompt})
        return self._body(kind, [shape(choice) for choice in ordered], rest)

    def _chat_choice(self, choice: Choice) -> dict[str, Any]:
        message = {"role": "assistant", "content": choice.text, "refusal": None}
        rest = {"logprobs": self._logprobs(choice.reports), "finish_reason": choice.finish_reason}
        return {"index": choice.index, "message": message, **rest}

    def _completion_choice(self, choice: Choice) -> dict[str, Any]:
        prompt = {} if choice.prompt_logprobs is None else {"prompt_logprobs": choice.prompt_logprobs}
        rest = {"logprobs": self._logprobs(choice.reports), "finish_reason": choice.finish_reason}
        return {"index": choice.index, "text": choice.text, **rest, **prompt}

    def _logprobs(self, reports: Reports) -> dict[str, Any] | None:
        if reports is None:
            return None
        return _chat_logprobs(reports) if self.chat else _completion_logprobs(reports)

    def role_chunk(self, index: int) -> bytes:
        """The first chunk of a choice of a chat. A completion has none."""
        return self._chunk(index, {"delta": {"role": "assistant", "content": ""}}, None)

    def text_chunk(self, index: int, text: str, reports: Reports = None) -> bytes:
        """A piece of the text, with the tokens that it comes from."""
        return self._chunk(index, {"delta": {"content": text}} if self.chat else {"text": text}, None, reports)

    def finish_chunk(self, index: int, finish_reason: str, reports: Reports = None) -> bytes:
        """The last chunk of a choice, without text; `reports` are of the tokens that gave none."""
        return self._chunk(index, {"delta": {}} if self.chat else {"text": ""}, finish_reason, reports)

    def usage_chunk(self, usage: Usage) -> bytes:
        """The last chunk of a stream that was asked to include its usage."""
        return self._body(self._chunk_kind, [], {"usage": usage.body()})

    @property
    def _chunk_kind(self) -> str:
        return "chat.completion.chunk" if self.chat else "text_completion"

    def _chunk(self, index: int, part: dict[str, Any], finish_reason: str | None, reports: Reports = None) -> bytes:
        logprobs = self._logprobs(reports) if reports else None
        choice = {"index": index, **part, "logprobs": logprobs, "finish_reason": finish_reason}
        return self._body(self._chunk_kind, [choice], {"usage": None} if self.include_usage else {})

    def _body(self, kind: str, choices: list[dict[str, Any]], rest: dict[str, Any]) -> bytes:
        head = {"id": self.id, "object": kind, "created": self.created, "model": self.model}
        return orjson.dumps({**head, "system_fingerprint": self.system_fingerprint, "choices": choices, **rest})


def _chat_logprobs(reports: Sequence[TokenReport]) -> dict[str, Any]:
    content = [{**_likely(each.chosen), "top_logprobs": [_likely(other) for other in each.top]} for each in reports]
    return {"content": content, "refusal": None}


def _likely(token: Likely) -> dict[str, Any]:
    return {"token": token.text, "logprob": token.logprob, "bytes": list(token.bytes)}


def _completion_logprobs(reports: Sequence[TokenReport]) -> dict[str, Any]:
    """The legacy shape. `top_logprobs` has the token itself too, also when it is not among the likeliest."""
    return {
        "tokens": [each.chosen.text for each in reports],
        "token_logprobs": [each.chosen.logprob for each in reports],
        "top_logprobs": [
            {token.text: token.logprob for token in (each.chosen, *reversed(each.top))} for each in reports
        ],
        "text_offset": [each.offset for each in reports],
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
