"""Requests about tokens alone, in the shape that vLLM gave them: a prompt to its ids, and ids back to text.

What they share with completions and chats is checked and computed by the same code, so that the ids are those that
the model would read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from . import checks
from .checks import Schema, show
from .errors import RequestError
from .parameters import MAX_NAME_CHARS, Parameter, Route, parameters_of
from .request import ChatRequest, CompletionRequest
from .resolve import chat_ids, prompt_ids
from .schema import body_schema
from .tokenizer import Tokenizer
from .validate import chat_request, completion_request

#: Ids of one request for a text.
MAX_TOKENS = 2**20

#: What is taken of the request that the prompt would be part of.
_OF_COMPLETIONS = ("model", "prompt")
_OF_CHATS = ("model", "messages", "add_generation_prompt", "continue_final_message", "chat_template_kwargs")

_STRINGS = Parameter("return_token_strs", checks.boolean, False)
_SPECIAL = Parameter("add_special_tokens", checks.boolean, True)
_TOKENS = Parameter("tokens", checks.token_ids(MAX_TOKENS), required=True)
_MODEL = Parameter("model", checks.text(1, MAX_NAME_CHARS))


@dataclass(frozen=True, slots=True)
class TokenizeRequest:
    """A prompt as a completion or a chat would have it. `special`: the tokenizer adds its BOS and the like."""

    prompt: CompletionRequest | ChatRequest
    special: bool
    strings: bool

    @property
    def model(self) -> str:
        return self.prompt.model

    def ids(self, tokenizer: Tokenizer) -> tuple[int, ...]:
        """Raise RequestError as a completion or a chat would, but for an empty text, which has no tokens."""
        if isinstance(self.prompt, ChatRequest):
            return prompt_ids("messages", chat_ids(self.prompt, tokenizer), tokenizer)
        (given,) = self.prompt.prompts
        if isinstance(given, str) and not (given and self.special):
            return tuple(tokenizer.encode(given, add_special_tokens=self.special))
        return prompt_ids("prompt", given, tokenizer)


@dataclass(frozen=True, slots=True)
class DetokenizeRequest:
    model: str
    tokens: tuple[int, ...]

    def text(self, tokenizer: Tokenizer) -> str:
        """The text of the ids, special tokens and all. Raise RequestError for ids that are not of the vocabulary."""
        ids = prompt_ids("tokens", self.tokens, tokenizer) if self.tokens else ()
        return tokenizer.decode(ids, skip_special_tokens=False)


def tokenize_request(body: object, model: str) -> TokenizeRequest:
    """Check the body of /tokenize; `model` is asked for where it names none. Raise RequestError."""
    values = _object(body)
    chat = "messages" in values
    strings = _optional(values, _STRINGS)
    special = False if chat else _optional(values, _SPECIAL)
    own = {_STRINGS.name} if chat else {_STRINGS.name, _SPECIAL.name}
    rows = parameters_of(Route.CHAT if chat else Route.COMPLETION)
    taken = _OF_CHATS if chat else _OF_COMPLETIONS
    known = own.union(taken, (name for name, row in rows.items() if row.check is None))
    _refuse_unknown(values, known)
    rest = {"model": model} | {name: value for name, value in values.items() if name not in own}
    if rest["model"] is None:
        rest["model"] = model
    request = chat_request(rest) if chat else completion_request(rest)
    if isinstance(request, CompletionRequest) and len(request.prompts) != 1:
        message = f"prompt must be one prompt here, not {len(request.prompts)}: send one request for each"
        raise RequestError(message, param="prompt", code="invalid_value")
    return TokenizeRequest(request, special, strings)


def detokenize_request(body: object, model: str) -> DetokenizeRequest:
    """Check the body of /detokenize; `model` is asked for where it names none. Raise RequestError."""
    values = _object(body)
    _refuse_unknown(values, {_MODEL.name, _TOKENS.name})
    if _TOKENS.name not in values:
        raise RequestError("tokens is missing", param="tokens", code="missing_required_parameter")
    tokens = checks.token_ids(MAX_TOKENS)("tokens", values["tokens"])
    return DetokenizeRequest(_optional(values, _MODEL) or model, tokens)


def tokenize_schema() -> Schema:
    """The body of /tokenize: of the two kinds one."""
    kinds = ((Route.COMPLETION, _OF_COMPLETIONS, (_SPECIAL,)), (Route.CHAT, _OF_CHATS, ()))
    return {"anyOf": [_kind(parameters_of(route), taken, own) for route, taken, own in kinds]}


def _kind(rows: Mapping[str, Parameter], taken: tuple[str, ...], own: tuple[Parameter, ...]) -> Schema:
    shared = [_MODEL if name == _MODEL.name else rows[name] for name in taken]
    return body_schema([*shared, *own, _STRINGS])


def detokenize_schema() -> Schema:
    """The body of /detokenize."""
    return body_schema([_MODEL, _TOKENS])


def _object(body: object) -> dict[str, Any]:
    if isinstance(body, dict):
        return body
    message = f"the request body must be a JSON object, not {'null' if body is None else show(body)}"
    raise RequestError(message, code="invalid_type")


def _refuse_unknown(values: dict[str, Any], known: set[str]) -> None:
    for name in values:
        if name not in known:
            message = f"{show(name)} is not a parameter of this request"
            raise RequestError(message, param=str(name)[:64], code="unknown_parameter")


def _optional(values: dict[str, Any], row: Parameter) -> Any:
    assert row.check is not None
    value = values.get(row.name)
    return row.default if value is None else row.check(row.name, value)
