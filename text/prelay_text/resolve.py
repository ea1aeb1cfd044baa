"""From a checked request to what its jobs consist of: prompt ids and sampling, one for each choice."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from prelay_queue.job import Priority, Sampling

from .checks import show
from .errors import RequestError
from .request import ChatRequest, CompletionRequest
from .tokenizer import Tokenizer

_SEED_MASK = 2**64 - 1


@dataclass(frozen=True, slots=True)
class Limits:
    """Tokens that a prompt and its answer may take together: of the model, and of the largest pools."""

    context_len: int
    pool_tokens: int | None = None  # None: no worker has told yet; it is checked again at the claim

    @property
    def tokens(self) -> int:
        return self.context_len if self.pool_tokens is None else min(self.context_len, self.pool_tokens)

    @property
    def name(self) -> str:
        """The limit that binds, for an error message."""
        if self.tokens == self.context_len:
            return f"the model's context of {self.context_len} tokens"
        return f"the {self.tokens} tokens that the workers' memory holds"


@dataclass(frozen=True, slots=True)
class JobPart:
    """What a JobSpec needs beside its id."""

    choice: int
    prompt_ids: tuple[int, ...]
    sampling: Sampling
    priority: Priority


def resolve(
    request: CompletionRequest | ChatRequest, tokenizer: Tokenizer, limits: Limits, *, spare_seed: int
) -> list[JobPart]:
    """One part for each of the n choices. `spare_seed`: 64 random bits, used when the request has no seed.

    Raise RequestError when ids are not of the vocabulary, the prompt is empty, or it does not fit.
    """
    ids = prompt_ids(request, tokenizer)
    _check_ids("stop_token_ids", request.stop_token_ids, tokenizer)
    _check_ids("logit_bias", tuple(token for token, _ in request.logit_bias), tokenizer)
    max_tokens = _room(request, len(ids), limits)
    if request.min_tokens > max_tokens:
        message = f"min_tokens is {request.min_tokens}, more than the {max_tokens} tokens that the answer may have"
        raise RequestError(message, param="min_tokens", code="invalid_value")
    bad_words = _bad_words(request.bad_words, tokenizer)
    seed = spare_seed if request.seed is None else request.seed
    return [
        JobPart(choice, ids, _sampling(request, max_tokens, choice_seed(seed, choice), bad_words), request.priority)
        for choice in range(request.n)
    ]


def _bad_words(words: tuple[str, ...], tokenizer: Tokenizer) -> tuple[tuple[int, ...], ...]:
    """Each word's ids as it stands at the beginning of a text, and as it stands after a space."""
    found = (tuple(tokenizer.encode(form)) for word in words for form in (word, f" {word.lstrip()}"))
    return tuple(dict.fromkeys(ids for ids in found if ids))


def choice_seed(seed: int, choice: int) -> int:
    """The seed of one choice, unsigned 64 bits: H(request seed, choice), for the first choice as well."""
    message = (seed & _SEED_MASK).to_bytes(8, "little") + choice.to_bytes(8, "little")
    return int.from_bytes(hashlib.blake2b(message, digest_size=8, person=b"prelay-choice").digest(), "little")


def prompt_ids(request: CompletionRequest | ChatRequest, tokenizer: Tokenizer) -> tuple[int, ...]:
    """The ids that the model reads. A text prompt gets the tokenizer's BOS, a chat its template's."""
    if isinstance(request, ChatRequest):
        name = "messages"
        text = tokenizer.template.render([message.as_dict() for message in request.messages])
        ids = tuple(tokenizer.encode(text))
    else:
        name = "prompt"
        given = request.prompt
        ids = given if isinstance(given, tuple) else tuple(tokenizer.encode(given, add_special_tokens=True))
    if not ids:
        raise RequestError(f"{name} is empty: it gives no token to start from", param=name, code="invalid_value")
    _check_ids(name, ids, tokenizer)
    return ids


def _check_ids(name: str, ids: tuple[int, ...], tokenizer: Tokenizer) -> None:
    last = tokenizer.vocab_size - 1
    if not ids or (min(ids) >= 0 and max(ids) <= last):
        return
    index, token = next((index, token) for index, token in enumerate(ids) if not 0 <= token <= last)
    message = f"{name}[{index}] is {show(token)}, but token ids go from 0 to {last}"
    raise RequestError(message, param=name, code="invalid_value")


def _room(request: CompletionRequest | ChatRequest, prompt: int, limits: Limits) -> int:
    """How many tokens the answer may have."""
    name = "messages" if isinstance(request, ChatRequest) else "prompt"
    room = limits.tokens - prompt
    if room < 1:
        message = f"{name} has {prompt} tokens, which leaves no room for an answer in {limits.name}"
        raise RequestError(message, param=name, code="context_length_exceeded")
    wanted = request.max_tokens
    if wanted is not None and wanted > room:
        message = (
            f"max_tokens is {wanted} and {name} has {prompt} tokens: together {wanted + prompt}, "
            f"more than {limits.name}"
        )
        raise RequestError(message, param="max_tokens", code="context_length_exceeded")
    return room if wanted is None else wanted


def _sampling(
    request: CompletionRequest | ChatRequest, max_tokens: int, seed: int, bad_words: tuple[tuple[int, ...], ...]
) -> Sampling:
    return Sampling(
        max_tokens=max_tokens,
        temperature=request.temperature,
        top_p=request.top_p,
        top_k=request.top_k,
        seed=seed,
        stop=request.stop,
        stop_token_ids=request.stop_token_ids,
        ignore_eos=request.ignore_eos,
        min_p=request.min_p,
        repetition_penalty=request.repetition_penalty,
        presence_penalty=request.presence_penalty,
        frequency_penalty=request.frequency_penalty,
        logit_bias=request.logit_bias,
        bad_words=bad_words,
        min_tokens=request.min_tokens,
        logprobs=-1 if request.reported is None else request.reported,
        prompt_logprobs=-1 if request.prompt_logprobs is None else request.prompt_logprobs,
    )
