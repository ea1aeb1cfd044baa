"""Checks of `messages`, `prompt`, `stream_options` and the template's arguments: what has an inner structure."""

from __future__ import annotations

from typing import Any

from .checks import (
    KEY_OF,
    boolean,
    encodable,
    field_of,
    is_int,
    show,
    text,
    token_ids,
    too_many,
    wrong_type,
    wrong_value,
)
from .errors import RequestError
from .request import MAX_CHOICES, Message, Prompt, StreamOptions
from .template import RESERVED_NAMES, text_of

_ROLES = ("system", "developer", "user", "assistant")
_TOOL_ROLES = ("tool", "function")
_name = text(1, 64)


_PROMPT = "a string, a list of token ids, or a list of such prompts"


def prompts(name: str, value: Any) -> tuple[Prompt, ...]:
    """One prompt, as a string or a list of token ids, or a list of prompts that are all of one kind."""
    if isinstance(value, str):
        return (encodable(name, value),)
    if not isinstance(value, list):
        raise wrong_type(name, _PROMPT, value)
    if not value:
        raise wrong_value(name, "a string or a non-empty list", value)
    if not isinstance(value[0], str | list):
        return (token_ids()(name, value),)
    if len(value) > MAX_CHOICES:
        raise too_many(name, MAX_CHOICES, value)
    one = _text_prompt if isinstance(value[0], str) else _id_prompt
    return tuple(one(f"{name}[{index}]", item) for index, item in enumerate(value))


def _text_prompt(name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise wrong_type(name, "a string, as the first prompt is", value)
    return encodable(name, value)


def _id_prompt(name: str, value: Any) -> tuple[int, ...]:
    if not isinstance(value, list):
        raise wrong_type(name, "a list of token ids, as the first prompt is", value)
    if not value:
        raise wrong_value(name, "a non-empty list of token ids", value)
    return tuple(token_ids()(name, value))


def messages(name: str, value: Any) -> tuple[Message, ...]:
    """A non-empty list of messages whose content is text."""
    if not isinstance(value, list):
        raise wrong_type(name, "a list of messages", value)
    if not value:
        raise wrong_value(name, "a non-empty list of messages", value)
    return tuple(_message(f"{name}[{index}]", item) for index, item in enumerate(value))


def _message(name: str, value: Any) -> Message:
    if not isinstance(value, dict):
        raise wrong_type(name, "an object with role and content", value)
    _refuse_others(name, value, ("role", "content", "name"))
    role = value.get("role")
    if role in _TOOL_ROLES:
        raise _unsupported(f"{name}.role", f"{role!r} is not implemented: this server calls no tools")
    if role not in _ROLES:
        raise wrong_value(f"{name}.role", f"one of {', '.join(_ROLES)}", role)
    label = value.get("name")
    return Message(
        role=str(role),
        content=_content(f"{name}.content", value.get("content")),
        name=None if label is None else _name(f"{name}.name", label),
    )


def _content(name: str, value: Any) -> str:
    if isinstance(value, str):
        return encodable(name, value)
    if not isinstance(value, list):
        raise wrong_type(name, "a string or a list of text parts", value)
    if not value:
        raise wrong_value(name, "a string or a non-empty list of text parts", value)
    for index, part in enumerate(value):
        _text_part(f"{name}[{index}]", part)
    return text_of(value)


def _text_part(name: str, part: Any) -> None:
    if not isinstance(part, dict):
        raise wrong_type(name, 'an object like {"type": "text", "text": "…"}', part)
    kind = part.get("type")
    if not isinstance(kind, str):
        raise wrong_type(f"{name}.type", "a string", kind)
    if kind != "text":
        raise _unsupported(f"{name}.type", f"{show(kind)} is not implemented: the models served here read text")
    _refuse_others(name, part, ("type", "text"))
    words = part.get("text")
    if not isinstance(words, str):
        raise wrong_type(f"{name}.text", "a string", words)
    encodable(f"{name}.text", words)


def _refuse_others(name: str, value: dict[str, Any], known: tuple[str, ...]) -> None:
    """Fields beside the known ones may only be null or empty: clients send back what they were given."""
    for key, item in value.items():
        if key not in known and item is not None and item != []:
            raise _unsupported(field_of(name, key), "is not implemented")


def stream_options(name: str, value: Any) -> StreamOptions:
    """The options of a stream: `include_usage`, and `continuous_usage_stats`, which needs it."""
    if not isinstance(value, dict):
        raise wrong_type(name, "an object", value)
    for key, item in value.items():
        if key == "include_obfuscation" and item in (None, False) and not is_int(item):
            continue
        if key == "include_obfuscation":
            raise _unsupported(f"{name}.{key}", "is not implemented: frames are sent as they are")
        if key not in ("include_usage", "continuous_usage_stats"):
            param = field_of(name, key)
            raise RequestError(f"{param} is not a known option", param=param, code="unknown_parameter")
    include = _option(name, value, "include_usage")
    continuous = _option(name, value, "continuous_usage_stats")
    if continuous and not include:
        param = f"{name}.continuous_usage_stats"
        message = f"{param} is true, but {name}.include_usage must be true for it"
        raise RequestError(message, param=param, code="invalid_value")
    return StreamOptions(include, continuous)


def _option(name: str, options: dict[str, Any], key: str) -> bool:
    value = options.get(key)
    return False if value is None else boolean(f"{name}.{key}", value)


def template_arguments(name: str, value: Any) -> dict[str, Any]:
    """An object of arguments for the model's chat template, of names that the server does not set itself."""
    if not isinstance(value, dict):
        raise wrong_type(name, "an object", value)
    for key in value:
        if not key.isidentifier():
            raise wrong_value(f"{KEY_OF}{name}", "a name that a template can read", key)
        if key in RESERVED_NAMES:
            message = f"{name}.{key} cannot be set: this name is the server's own"
            raise RequestError(message, param=f"{name}.{key}", code="invalid_value")
    return dict(value)


def _unsupported(param: str, why: str) -> RequestError:
    return RequestError(f"{param} {why}", param=param, code="unsupported_value")
