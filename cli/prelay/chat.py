"""A conversation in the terminal with a running server."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx

from .apikeys import client_headers
from .errors import CliError


@dataclass
class Conversation:
    """Where to ask, how, and what was said so far."""

    url: str
    model: str | None = None
    system: str | None = None
    max_tokens: int | None = None
    temperature: float = 0.0
    seed: int | None = None
    messages: list[dict[str, str]] = field(default_factory=list)
    api_key: str | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        """OpenAI's clients want a base URL that ends in /v1, so people have that one at hand: it does too."""
        self.url = self.url.rstrip("/").removesuffix("/v1")

    def body(self) -> dict[str, Any]:
        optional = {"max_tokens": self.max_tokens, "seed": self.seed}
        return {
            "model": self.model,
            "messages": self.messages,
            "temperature": self.temperature,
            "stream": True,
            **{name: value for name, value in optional.items() if value is not None},
        }


def converse(conversation: Conversation, question: str | None) -> int:
    """Answer one question, or questions until /exit or the end of the input. Return the exit code."""
    headers = client_headers(conversation.api_key)
    # An answer may take as long as it likes; a server that is not there is found out at once.
    timeout = httpx.Timeout(None, connect=5)
    with httpx.Client(base_url=conversation.url, headers=headers, timeout=timeout, trust_env=False) as client:
        conversation.model = conversation.model or _first_model(client)
        if conversation.system:
            conversation.messages.append({"role": "system", "content": conversation.system})
        if question is not None:
            return 0 if _ask(client, conversation, question) else 130
        print(f"{conversation.model} at {conversation.url}. Ctrl-C stops an answer, /exit ends.", file=sys.stderr)
        while (line := _read()) is not None:
            if line:
                _ask_gently(client, conversation, line)
    return 0


def _read() -> str | None:
    """Return the next line, None at the end. Ctrl-C at an empty prompt ends too."""
    try:
        line = input("› " if sys.stdin.isatty() else "").strip()
    except (EOFError, KeyboardInterrupt):
        return None
    return None if line in ("/exit", "/quit") else line


def _ask_gently(client: httpx.Client, conversation: Conversation, question: str) -> None:
    """In a conversation one refused or broken answer is said, and the next question may come."""
    try:
        _ask(client, conversation, question)
    except CliError as error:
        conversation.messages.pop()
        print(f"prelay: {error}", file=sys.stderr)


def _ask(client: httpx.Client, conversation: Conversation, question: str) -> bool:
    """Print the answer as it comes, and remember it. False when Ctrl-C stopped it."""
    conversation.messages.append({"role": "user", "content": question})
    parts: list[str] = []
    finished = True
    try:
        for part in _stream(client, conversation.body()):
            parts.append(part)
            print(part, end="", flush=True)
    except KeyboardInterrupt:  # closing the connection cancels the request
        finished = False
    print("" if finished else " [stopped]")
    conversation.messages.append({"role": "assistant", "content": "".join(parts)})
    return finished


def _stream(client: httpx.Client, body: dict[str, Any]) -> Iterator[str]:
    """Yield the pieces of text of one answer. Raise CliError with the server's own words."""
    try:
        with client.stream("POST", "/v1/chat/completions", json=body) as answer:
            if answer.status_code != 200:
                answer.read()
                raise CliError(_error_of(answer))
            for line in answer.iter_lines():
                if line == "data: [DONE]":
                    return
                if line.startswith("data: "):
                    yield from _pieces(json.loads(line.removeprefix("data: ")))
    except httpx.HTTPError as error:
        raise CliError(f"{client.base_url}: {error or type(error).__name__}") from None
    raise CliError("the server closed the stream before its end")


def _pieces(chunk: dict[str, Any]) -> Iterator[str]:
    if "error" in chunk:
        raise CliError(str(chunk["error"].get("message", chunk["error"])))
    for choice in chunk.get("choices", ()):
        if text := choice.get("delta", {}).get("content"):
            yield text


def _first_model(client: httpx.Client) -> str:
    try:
        answer = client.get("/v1/models")
        if answer.status_code != 200:
            raise CliError(_error_of(answer))
        return str(answer.json()["data"][0]["id"])
    except httpx.HTTPError as error:
        raise CliError(f"no server answers at {client.base_url} ({error}); start one: prelay serve") from None
    except (ValueError, KeyError, IndexError):
        raise CliError(f"{client.base_url} answers, and is no OpenAI-style API") from None


def _error_of(answer: httpx.Response) -> str:
    try:
        return f"{answer.json()['error']['message']} (status {answer.status_code})"
    except (ValueError, KeyError, TypeError):
        return f"{answer.url} answers with status {answer.status_code}"
