"""From a checked request to what its jobs consist of: prompt ids and sampling, one for each choice."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass

from prelay_queue.job import Priority, Sampling

from .checks import show
from .echo import Echo, echo_of
from .errors import RequestError
from .request import ChatRequest, CompletionRequest, Prompt
from .tokenizer import Tokenizer

_SEED_MASK = 2**64 - 1

#: Tokens of the prompts of all choices of one request together; each choice is a job with a prompt of its own.
MAX_PROMPT_TOKENS = 2**20


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
            # In words by which litellm and others know this error, to try a model that takes more.
            return f"the model's maximum context limit of {self.context_len} tokens"
        return f"the {self.tokens} tokens that the workers' memory holds"


@dataclass(frozen=True, slots=True)
class JobPart:
    """What a JobSpec needs beside its id. `choice` counts through the candidates of all prompts.

    `echo` is the prompt as it is repeated before the answer, if the request asks for it.
    """

    choice: int
    prompt_ids: tuple[int, ...]
    sampling: Sampling
    priority: Priority
    echo: Echo | None = None


def check_model(request: CompletionRequest | ChatRequest, served: str) -> None:
    """Raise RequestError, 404, for a request to another model than the one that is served."""
    if request.model != served:
        message = f"model {request.model[:100]!r} is not served here; this server has {served!r}"
        raise RequestError(message, param="model", code="model_not_found", status=404)


def resolve(
    request: CompletionRequest | ChatRequest, tokenizer: Tokenizer, limits: Limits, *, spare_seed: int
) -> list[JobPart]:
    """One part for each candidate of each prompt. `spare_seed`: 64 random bits, used when the request has no seed.

    A prompt's answers do not depend on the other prompts: with a seed they are those of a request for it alone.
    Raise RequestError when ids are not of the vocabulary, a prompt is empty, or it does not fit.
    """
    _check_ids("stop_token_ids", request.stop_token_ids, tokenizer)
    _check_ids("logit_bias", tuple(token for token, _ in request.logit_bias), tokenizer)
    bad_words = _bad_words(request.bad_words, tokenizer)
    seed = spare_seed if request.seed is None else request.seed
    parts: list[JobPart] = []
    tokens = 0
    for name, given in _prompts(request, tokenizer):
        ids = prompt_ids(name, given, tokenizer)
        tokens += len(ids) * request.candidates
        if tokens > MAX_PROMPT_TOKENS:
            message = f"{name}: the prompts of all choices have {tokens} tokens up to here; at most {MAX_PROMPT_TOKENS}"
            raise RequestError(message, param=name, code="invalid_value")
        max_tokens = _room(request, name, len(ids), limits)
        echo = _echo(request, given, ids, tokenizer)
        for candidate in range(request.candidates):
            sampling = _sampling(request, max_tokens, choice_seed(seed, candidate), bad_words)
            parts.append(JobPart(len(parts), ids, sampling, request.priority, echo))
    return parts


def _echo(
    request: CompletionRequest | ChatRequest, given: Prompt, ids: tuple[int, ...], tokenizer: Tokenizer
) -> Echo | None:
    if isinstance(request, ChatRequest) or not request.echo:
        return None
    return echo_of(ids, given if isinstance(given, str) else None, tokenizer)


def _bad_words(words: tuple[str, ...], tokenizer: Tokenizer) -> tuple[tuple[int, ...], ...]:
    """Each word's ids as it stands at the beginning of a text, and as it stands after a space."""
    found = (tuple(tokenizer.encode(form)) for word in words for form in (word, f" {word.lstrip()}"))
    return tuple(dict.fromkeys(ids for ids in found if ids))


def choice_seed(seed: int, choice: int) -> int:
    """The seed of one choice, unsigned 64 bits: H(request seed, choice), for the first choice as well."""
    message = (seed & _SEED_MASK).to_bytes(8, "little") + choice.to_bytes(8, "little")
    return int.from_bytes(hashlib.blake2b(message, digest_size=8, person=b"prelay-choice").digest(), "little")


def _prompts(request: CompletionRequest | ChatRequest, tokenizer: Tokenizer) -> Iterator[tuple[str, Prompt]]:
    """Each prompt and its name in error messages; that of a chat as ids, for its text has its BOS already."""
    if isinstance(request, ChatRequest):
        yield "messages", chat_ids(request, tokenizer)
    elif len(request.prompts) == 1:
        yield "prompt", request.prompts[0]
    else:
        yield from ((f"prompt[{index}]", prompt) for index, prompt in enumerate(request.prompts))


def chat_ids(request: ChatRequest, tokenizer: Tokenizer) -> tuple[int, ...]:
    """The ids of a conversation as the model's template writes it, BOS and all."""
    messages = [message.as_dict() for message in request.messages]
    template, arguments = tokenizer.template, request.chat_template_kwargs
    if request.continue_final_message:
        text = template.render_open(messages, arguments)
    else:
        text = template.render(messages, request.add_generation_prompt, arguments)
    return tuple(tokenizer.encode_chat(text))


def prompt_ids(name: str, given: Prompt, tokenizer: Tokenizer) -> tuple[int, ...]:
    """The ids that the model reads: a text gets the tokenizer's BOS, ids are taken as they are."""
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


def _room(request: CompletionRequest | ChatRequest, name: str, prompt: int, limits: Limits) -> int:
    """How many tokens the answer may have; of one that is not asked for, a job makes one token that nobody sees."""
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
    if wanted is None:
        wanted = room if request.default_tokens is None else min(request.default_tokens, room)
    allowed = max(wanted, 1)
    most = 0 if request.prompt_only else allowed
    if request.min_tokens > most:
        message = f"min_tokens is {request.min_tokens}, more than the {most} tokens that the answer may have"
        raise RequestError(message, param="min_tokens", code="invalid_value")
    return allowed


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
        logprobs=_logprobs(request),
        prompt_logprobs=_prompt_logprobs(request),
        skip_special_tokens=request.skip_special_tokens,
    )


def _logprobs(request: CompletionRequest | ChatRequest) -> int:
    """What each token of the answer comes with: what the client asks for, and what ranks candidates."""
    if request.reported is not None:
        return request.reported
    return 0 if request.candidates > request.n else -1


def _prompt_logprobs(request: CompletionRequest | ChatRequest) -> int:
    """What each token of the prompt comes with, for its own field and for its echo."""
    echoed = request.reported if isinstance(request, CompletionRequest) and request.echo else None
    return max((each for each in (request.prompt_logprobs, echoed) if each is not None), default=-1)
