"""Answers in OpenAI's shape, as bytes. Pure encoding: sending is the API's work.

A chat stream is, for each choice: one chunk with the role, chunks with content, one with the finish reason
and the rest of the content, which mostly is none. With `include_usage` every chunk carries `usage: null` (or,
where that is asked for, the usage so far) and one more, without choices, carries the usage. Then DONE.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from .reports import Likely, TokenReport

#: The last frame of every stream.
DONE = b"data: [DONE]\n\n"

#: What is told of some tokens; None when the request did not ask.
Reports = Sequence[TokenReport] | None

_NOTHING: Mapping[str, Any] = {}

#: Line breaks (a comment or an id must not end early), and NUL, which makes clients ignore an id.
_BREAKS = str.maketrans(dict.fromkeys("\r\n\0", " "))


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of the whole request: each prompt once, the answers of all choices, also of those that are not shown."""

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
class Part:
    """A piece of an answer: its text, and the tokens that it is the first to rest on.

    `reports` has one entry for each token, those of an echoed prompt included; None when no logprobs are asked for.
    """

    text: str
    reports: Reports = None
    ids: tuple[int, ...] = ()

    def __add__(self, other: Part) -> Part:
        """This part and the next as one."""
        reports = None if self.reports is None else (*self.reports, *(other.reports or ()))
        return Part(self.text + other.text, reports, self.ids + other.ids)


@dataclass(frozen=True, slots=True)
class Choice:
    """One finished choice. `finish_reason` is "stop" or "length"; other endings are errors, not answers.

    `part` is the whole answer. `prompt_logprobs` is None when the request does not ask for them.
    """

    index: int
    part: Part
    finish_reason: str
    prompt_ids: tuple[int, ...] = ()
    prompt_logprobs: list[Any] | None = None


@dataclass(frozen=True)
class Renderer:
    """Renders the answer to one request; its fields stand in every body of that answer.

    `created` is in Unix seconds. `include_usage` and `continuous_usage` concern the chunks of a stream only.
    `token_ids`: the ids of prompts and answers are told, where vLLM tells them. `service_tier` is told if one was
    asked for.
    """

    chat: bool
    id: str
    created: int
    model: str
    system_fingerprint: str
    include_usage: bool = False
    continuous_usage: bool = False
    token_ids: bool = False
    service_tier: str | None = None

    def answer(self, choices: Iterable[Choice], usage: Usage) -> bytes:
        """The whole answer in one body, choices in the order of their index."""
        ordered = sorted(choices, key=lambda choice: choice.index)
        shape = self._chat_choice if self.chat else self._completion_choice
        kind = "chat.completion" if self.chat else "text_completion"
        rest = {"usage": usage.body(), **(self._of_prompt(ordered[0]) if self.chat else {})}
        return self._body(kind, [shape(choice) for choice in ordered], rest)

    def _chat_choice(self, choice: Choice) -> dict[str, Any]:
        message = {"role": "assistant", "content": choice.part.text, "refusal": None}
        return {"index": choice.index, "message": message, **self._ending(choice)}

    def _completion_choice(self, choice: Choice) -> dict[str, Any]:
        return {"index": choice.index, "text": choice.part.text, **self._ending(choice), **self._of_prompt(choice)}

    def _ending(self, choice: Choice) -> dict[str, Any]:
        ids = {"token_ids": choice.part.ids} if self.token_ids else {}
        return {"logprobs": self._logprobs(choice.part.reports), "finish_reason": choice.finish_reason, **ids}

    def _of_prompt(self, choice: Choice) -> dict[str, Any]:
        """What is told of the prompt: of a completion in its choice, of a chat beside the choices, as in vLLM."""
        ids = {"prompt_token_ids": choice.prompt_ids} if self.token_ids else {}
        return ids if choice.prompt_logprobs is None else {**ids, "prompt_logprobs": choice.prompt_logprobs}

    def _logprobs(self, reports: Reports) -> dict[str, Any] | None:
        if reports is None:
            return None
        return _chat_logprobs(reports) if self.chat else _completion_logprobs(reports)

    def first_chunk(self, index: int, prompt_ids: Sequence[int], usage: Usage | None = None) -> bytes | None:
        """The chunk of a choice before any text: a chat's role, and with `token_ids` the prompt's ids."""
        ids = {"prompt_token_ids": prompt_ids} if self.token_ids else {}
        if self.chat:
            choice = self._chunk_choice(index, {"delta": {"role": "assistant", "content": ""}}, Part(""), None)
            return self._chunk(choice, usage, ids)
        if not ids:
            return None
        return self._chunk({**self._chunk_choice(index, {"text": ""}, Part(""), None), **ids}, usage)

    def text_chunk(self, index: int, part: Part, usage: Usage | None = None) -> bytes:
        """A piece of the text, with the tokens that it comes from. `usage`, if given, is what it is after it."""
        words = {"delta": {"content": part.text}} if self.chat else {"text": part.text}
        return self._chunk(self._chunk_choice(index, words, part, None), usage)

    def finish_chunk(self, index: int, finish_reason: str, part: Part, usage: Usage | None = None) -> bytes:
        """The last chunk of a choice, with the text that only the end let out.

        In one chunk, so that a client has both or neither, and its place says which.
        """
        words: dict[str, Any] = {"text": part.text}
        if self.chat:
            words = {"delta": {"content": part.text} if part.text else {}}
        return self._chunk(self._chunk_choice(index, words, part, finish_reason), usage)

    def usage_chunk(self, usage: Usage) -> bytes:
        """The last chunk of a stream that was asked to include its usage."""
        return self._body(self._chunk_kind, [], {"usage": usage.body()})

    @property
    def _chunk_kind(self) -> str:
        return "chat.completion.chunk" if self.chat else "text_completion"

    def _chunk_choice(self, index: int, words: dict[str, Any], part: Part, finish_reason: str | None) -> dict[str, Any]:
        logprobs = self._logprobs(part.reports) if part.reports else None
        choice = {"index": index, **words, "logprobs": logprobs, "finish_reason": finish_reason}
        if self.token_ids:
            choice["token_ids"] = part.ids
        return choice

    def _chunk(self, choice: dict[str, Any], usage: Usage | None, rest: Mapping[str, Any] = _NOTHING) -> bytes:
        told = {"usage": None if usage is None else usage.body()} if self.include_usage else {}
        return self._body(self._chunk_kind, [choice], {**rest, **told})

    def _body(self, kind: str, choices: list[dict[str, Any]], rest: dict[str, Any]) -> bytes:
        head = {"id": self.id, "object": kind, "created": self.created, "model": self.model}
        if self.service_tier is not None:
            head["service_tier"] = self.service_tier
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
        "top_logprobs": [_completion_top(each) for each in reports],
        "text_offset": [each.offset for each in reports],
    }


def _completion_top(report: TokenReport) -> dict[str, float | None] | None:
    if report.chosen.logprob is None:
        return None
    return {token.text: token.logprob for token in (report.chosen, *reversed(report.top))}


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
