"""What the end-to-end tests ask of a server: streams read to their end, and what they gave."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx
import orjson


@dataclass
class Answer:
    """One stream, read to its end."""

    id: str = ""
    text: str = ""
    finish: list[str] = field(default_factory=list)
    usage: dict[str, int] | None = None  # see `counted`
    cached: int = 0  # tokens of the prompt that a cache had
    logprobs: list[tuple[str, float, dict[str, float]]] = field(default_factory=list)
    cursors: list[tuple[int, int]] = field(default_factory=list)
    errors: list[dict[str, Any]] = field(default_factory=list)
    done: int = 0

    @property
    def epochs(self) -> list[int]:
        """The attempts that the text came from."""
        return sorted({epoch for epoch, _ in self.cursors})

    def check(self) -> None:
        """One finish, one [DONE], cursors that only go forward, nothing of a preempt."""
        assert not self.errors, self.errors
        assert len(self.finish) == 1, self.finish
        assert self.finish[0] in ("stop", "length")
        assert self.done == 1
        assert self.cursors == sorted(self.cursors)
        seqs = [seq for _, seq in self.cursors]
        assert seqs == sorted(seqs), seqs


def frames(response: httpx.Response) -> Iterator[tuple[str, str]]:
    """(id, data) of each event of a stream."""
    cursor = ""
    for line in response.iter_lines():
        if line.startswith("id: "):
            cursor = line[4:]
        elif line.startswith("data: "):
            yield cursor, line[6:]


def stream(url: str, body: dict[str, Any], on_frame: Callable[[Answer], None] | None = None) -> Answer:
    """Stream one completion or chat; `on_frame` is called after each piece of text."""
    answer = Answer()
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    body = {**body, "stream": True, "stream_options": {"include_usage": True}}
    with httpx.stream("POST", url + path, json=body, timeout=120, verify=False) as response:
        assert response.status_code == 200, response.read()
        for cursor, data in frames(response):
            if data == "[DONE]":
                answer.done += 1
                continue
            event = orjson.loads(data)
            if "error" in event:
                answer.errors.append(event["error"])
                continue
            answer.id = event["id"]
            epoch, seq = cursor.split("-")
            answer.cursors.append((int(epoch), int(seq)))
            if event.get("usage"):
                answer.usage = counted(event["usage"])
                answer.cached = event["usage"]["prompt_tokens_details"]["cached_tokens"]
            for choice in event["choices"]:
                piece = choice["text"] if "text" in choice else choice["delta"].get("content") or ""
                answer.text += piece
                answer.logprobs += reported(choice)
                if choice["finish_reason"]:
                    answer.finish.append(choice["finish_reason"])
                if piece and on_frame is not None:
                    on_frame(answer)
    return answer


def counted(usage: dict[str, Any]) -> dict[str, int]:
    """What does not depend on who asked before."""
    return {name: usage[name] for name in ("prompt_tokens", "completion_tokens", "total_tokens")}


def reported(choice: dict[str, Any]) -> list[tuple[str, float, dict[str, float]]]:
    """Of a completion: each token with its log-probability and the likeliest tokens'."""
    found = choice["logprobs"]
    return list(zip(found["tokens"], found["token_logprobs"], found["top_logprobs"], strict=True)) if found else []


def together(url: str, bodies: list[dict[str, Any]]) -> list[Answer]:
    """Stream all at once, each from a thread of its own."""
    answers: list[Answer | BaseException | None] = [None] * len(bodies)

    def run(index: int) -> None:
        try:
            answers[index] = stream(url, bodies[index])
        except BaseException as error:  # reported in the test's own thread below
            answers[index] = error

    threads = [threading.Thread(target=run, args=(i,)) for i in range(len(bodies))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for answer in answers:
        if isinstance(answer, BaseException):
            raise answer
    return [answer for answer in answers if isinstance(answer, Answer)]
