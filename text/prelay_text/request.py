"""A request of a client, checked: what the rest of the system may rely on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from prelay_queue.job import Priority


@dataclass(frozen=True, kw_only=True)
class Request:
    """What both kinds of request share. `max_tokens` None: as many as fit. `seed` None: drawn at submit.

    `user` and `metadata` are checked and carried along, and nothing reads them yet.
    """

    model: str
    max_tokens: int | None = None
    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0 is off
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    bad_words: tuple[str, ...] = ()
    min_tokens: int = 0
    prompt_logprobs: int | None = None  # None: the prompt's tokens are not reported
    priority: Priority = Priority.NORMAL
    deadline_ms: int | None = None  # from its arrival to its end; None: whenever
    stream: bool = False
    include_usage: bool = False  # of the stream; an answer in one piece always has its usage
    user: str | None = None
    metadata: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class CompletionRequest(Request):
    """One prompt, as text or as token ids; the answer goes on from it."""

    prompt: str | tuple[int, ...]
    logprobs: int | None = None  # likeliest tokens reported beside each; None: nothing is reported

    @property
    def reported(self) -> int | None:
        """How many of the likeliest tokens are reported with each token of the answer; None: not even its own."""
        return self.logprobs


@dataclass(frozen=True, slots=True)
class Message:
    role: str
    content: str
    name: str | None = None

    def as_dict(self) -> dict[str, str]:
        """The form that chat templates read."""
        named = {} if self.name is None else {"name": self.name}
        return {"role": self.role, "content": self.content, **named}


@dataclass(frozen=True, kw_only=True)
class ChatRequest(Request):
    """A conversation; the answer is the assistant's next message."""

    messages: tuple[Message, ...]
    logprobs: bool = False
    top_logprobs: int | None = None

    @property
    def reported(self) -> int | None:
        """How many of the likeliest tokens are reported with each token of the answer; None: not even its own."""
        return (self.top_logprobs or 0) if self.logprobs else None
