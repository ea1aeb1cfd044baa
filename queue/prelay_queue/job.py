"""What a job is: the part that never changes after submit, and what a worker is handed at a claim."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import orjson

from .errors import BadMessageError

#: Version of the messages below and of the Lua scripts; a worker refuses jobs of a newer one.
PROTOCOL_VERSION = 1


class Priority(StrEnum):
    """Class of a job. Work streams are served in this order (`keys.CLASS_ORDER`)."""

    INTERACTIVE = "interactive"
    NORMAL = "normal"
    BATCH = "batch"


class FinishReason(StrEnum):
    """How a job ended. `STOP` and `LENGTH` are OpenAI's; the others end a stream with an error event."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    DEADLINE = "deadline"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the tokens of one job are chosen and when it ends.

    The sampler is a function of (seed, seq) and the logits only, so nothing else need be carried
    over a restart. `seed` is already the seed of this choice: H(request seed, choice).
    """

    max_tokens: int
    temperature: float = 1.0  # 0 is greedy
    top_p: float = 1.0
    top_k: int = 0  # 0 is off
    seed: int = 0  # unsigned, 64 bits
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    min_p: float = 0.0  # 0 is off
    repetition_penalty: float = 1.0  # over prompt and answer; 1 is off
    presence_penalty: float = 0.0  # over the answer, as the next one
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()  # (token id, what is added to its logit)
    bad_words: tuple[tuple[int, ...], ...] = ()  # token ids in a row that must not come
    min_tokens: int = 0  # before so many tokens, neither an end token nor a stop ends the answer
    logprobs: int = -1  # how many of the likeliest tokens are reported with each token; -1: not even its own
    prompt_logprobs: int = -1  # the same for the prompt's tokens
    skip_special_tokens: bool = True  # False: they are part of the text, also for stop strings


@dataclass(frozen=True, slots=True)
class JobSpec:
    """The immutable part of a job, written once at submit. `id` is `<request id>/<choice>`."""

    id: str
    prompt_ids: tuple[int, ...]
    sampling: Sampling
    priority: Priority = Priority.NORMAL

    @property
    def choice(self) -> int:
        return int(self.id.rpartition("/")[2])

    def encode(self) -> bytes:
        return orjson.dumps(self)

    @classmethod
    def decode(cls, raw: bytes) -> JobSpec:
        """Raise BadMessageError, with the raw bytes kept, when `raw` is not a job spec."""
        try:
            data: dict[str, Any] = orjson.loads(raw)
            sampling = data.pop("sampling")
            sampling["stop"] = tuple(sampling["stop"])
            sampling["stop_token_ids"] = tuple(sampling["stop_token_ids"])
            sampling["logit_bias"] = tuple((token, bias) for token, bias in sampling.get("logit_bias", ()))
            sampling["bad_words"] = tuple(map(tuple, sampling.get("bad_words", ())))
            spec = cls(
                id=data["id"],
                prompt_ids=tuple(data["prompt_ids"]),
                sampling=Sampling(**sampling),
                priority=Priority(data["priority"]),
            )
            _check_types(spec)
            return spec
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise BadMessageError(raw, str(error)) from None


def _check_types(spec: JobSpec) -> None:
    """Raise TypeError for what would only fail inside a worker's step, where it takes the whole batch along."""
    sampling = spec.sampling
    texts = (spec.id, *sampling.stop)
    integers = (
        sampling.max_tokens, sampling.top_k, sampling.seed, sampling.min_tokens,
        sampling.logprobs, sampling.prompt_logprobs,
        *sampling.stop_token_ids, *spec.prompt_ids,
        *(token for token, _ in sampling.logit_bias), *(token for word in sampling.bad_words for token in word),
    )  # fmt: skip
    numbers = (
        sampling.temperature, sampling.top_p, sampling.min_p,
        sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty,
        *(bias for _, bias in sampling.logit_bias),
    )  # fmt: skip
    if not all(isinstance(each, str) for each in texts):
        raise TypeError("id and stop must be strings")
    if not all(type(each) is int for each in integers):  # bool is an int to isinstance
        raise TypeError("max_tokens, min_tokens, top_k, seed, logprobs and token ids must be integers")
    if not all(type(each) in (int, float) for each in numbers):
        raise TypeError("temperature, top_p, min_p, penalties and biases must be numbers")
    if not all(sampling.bad_words):
        raise TypeError("a bad word must have a token")
    if not all(type(each) is bool for each in (sampling.ignore_eos, sampling.skip_special_tokens)):
        raise TypeError("ignore_eos and skip_special_tokens must be true or false")


@dataclass(frozen=True, slots=True)
class Claim:
    """A job as handed to the worker that now owns it, at one epoch.

    `ids` are the tokens of the answer that already stand in the log (seq 0 … len-1): a prefill
    computes prompt + ids and samples seq len(ids); a decode worker's last id is the one it feeds first.
    `kv` is the hand-over reference as the prefill worker wrote it (opaque here; `prelay_kv` reads it).
    """

    spec: JobSpec
    epoch: int
    ids: tuple[int, ...] = ()
    kv: bytes = b""
    preemptions: int = 0
    alone_until: int = -1  # it was in crashes: no neighbour while no more tokens than this stand
    submitted_ms: int = 0  # server time
    deadline_ms: int = 0  # server time, 0 is none
    failed_handovers: int = 0  # in a row
    queued_ms: int = 0  # server time at which it came into the stream that it was claimed from, 0 is unknown

    @property
    def id(self) -> str:
        return self.spec.id

    def overdue(self, server_ms: int) -> bool:
        """Whether its deadline has passed when the server's clock shows this."""
        return 0 < self.deadline_ms < server_ms

    @property
    def alone(self) -> bool:
        """Whether it must begin with no neighbour."""
        return len(self.ids) <= self.alone_until
