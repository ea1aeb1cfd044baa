"""A request of a client, checked: what the rest of the system may rely on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from prelay_queue.job import Priority

#: Choices of one request, over all its prompts.
MAX_CHOICES = 128

#: Tokens of a completion that is asked for without max_tokens: OpenAI's number.
COMPLETION_TOKENS = 16

#: Text, or the ids that it becomes.
Prompt = str | tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StreamOptions:
    """Where a stream tells its usage: at its end, and in every chunk. A whole answer always has it."""

    include_usage: bool = False
    continuous_usage: bool = False


@dataclass(frozen=True, kw_only=True)
class Request:
    """What both kinds of request share. `max_tokens` None: `default_tokens`. `seed` None: drawn at submit.

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
    skip_special_tokens: bool = True
    return_token_ids: bool = False
    priority: Priority = Priority.NORMAL
    deadline_ms: int | None = None  # from its arrival to its end; None: whenever
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    user: str | None = None
    metadata: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class CompletionRequest(Request):
    """Prompts, as text or as token ids; each answer goes on from its prompt.

    `max_tokens` 0 (with `echo` only) asks for the prompt alone. `best_of` None: as many as `n`.
    """

    prompts: tuple[Prompt, ...]
    logprobs: int | None = None  # likeliest tokens reported beside each; None: nothing is reported
    echo: bool = False
    best_of: int | None = None

    @property
    def candidates(self) -> int:
        """How many answers are computed for each prompt; the `n` likeliest of them are shown."""
        return self.n if self.best_of is None else self.best_of

    @property
    def default_tokens(self) -> int | None:
        """How many tokens an answer may have when that is not said, if so many fit; None: as many as fit."""
        return COMPLETION_TOKENS

    @property
    def prompt_only(self) -> bool:
        """No answer is asked for."""
        return self.max_tokens == 0

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
    service_tier: str | None = None  # as the client named it
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)

    @property
    def candidates(self) -> int:
        """How many answers are computed: all of them are shown."""
        return self.n

    @property
    def default_tokens(self) -> int | None:
        """A chat's answer ends by itself, and has what room there is."""
        return None

    @property
    def prompt_only(self) -> bool:
        """A chat is always answered."""
        return False

    @property
    def reported(self) -> int | None:
        """How many of the likeliest tokens are reported with each token of the answer; None: not even its own."""
        return (self.top_logprobs or 0) if self.logprobs else None
