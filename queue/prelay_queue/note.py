"""What is said of a token besides its id: its log-probabilities, and with the first token what concerns the prompt.

A note is written with its token by one attempt, stands in the log beside it, and goes when the token goes. So whatever
a preempt discards it discards whole, and what stands is never reported twice.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import orjson

from .errors import BadMessageError

#: What a log-probability of minus infinity becomes: JSON has no infinities. OpenAI's and vLLM's figure.
LEAST_LOGPROB = -9999.0


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Natural logarithms of probabilities at one position, of the model's own distribution.

    `rank` of the token is 1 for the likeliest. `top` are the likeliest tokens (id, logprob), the likeliest first.
    """

    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Note:
    """`logprobs` of the token itself; with the first token of an answer also those of the prompt's tokens.

    `prompt` has an entry for each token of the prompt but the first, which nothing comes before. `cached` counts the
    tokens of the prompt whose keys and values the prefill found in its cache.
    """

    logprobs: TokenLogprobs | None = None
    prompt: tuple[TokenLogprobs, ...] = ()
    cached: int = 0

    def encode(self) -> str:
        """JSON; '' when there is nothing to say, which is what most tokens carry."""
        found: dict[str, Any] = {}
        if self.logprobs is not None:
            found["lp"] = _pack(self.logprobs)
        if self.prompt:
            found["prompt"] = [_pack(each) for each in self.prompt]
        if self.cached:
            found["cached"] = self.cached
        return orjson.dumps(found).decode() if found else ""

    @classmethod
    def decode(cls, raw: str) -> Note:
        """Raise BadMessageError when `raw` is no note."""
        if not raw:
            return cls()
        try:
            found = orjson.loads(raw)
            own = _unpack(found["lp"]) if "lp" in found else None
            return cls(own, tuple(map(_unpack, found.get("prompt", ()))), int(found.get("cached", 0)))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise BadMessageError(raw.encode(), str(error)) from None


def _pack(item: TokenLogprobs) -> list[Any]:
    return [_finite(item.logprob), item.rank, [[token, _finite(logprob)] for token, logprob in item.top]]


def _finite(logprob: float) -> float:
    return logprob if math.isfinite(logprob) else LEAST_LOGPROB


def _unpack(raw: list[Any]) -> TokenLogprobs:
    logprob, rank, top = raw
    return TokenLogprobs(float(logprob), int(rank), tuple((int(token), float(value)) for token, value in top))
