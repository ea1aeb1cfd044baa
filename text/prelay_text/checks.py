"""Checks of one value of a request: each takes the parameter's name and the value as parsed from JSON,
and gives the value back in the form the request keeps, or raises RequestError.
"""

from __future__ import annotations

import math
import re
import reprlib
from collections.abc import Callable, Mapping, Sized
from typing import Any, Generic, TypeVar

from .errors import RequestError

Check = Callable[[str, Any], Any]
Schema = dict[str, Any]
T = TypeVar("T")


class Described(Generic[T]):
    """A check that knows the JSON Schema of what it takes: what is outside of it is refused.

    Not all that is inside is taken: a schema says nothing of the vocabulary, or of half characters.
    """

    def __init__(self, check: Callable[[str, Any], T], schema: Schema) -> None:
        self._check = check
        self.schema = schema
        self.__doc__ = check.__doc__

    def __call__(self, name: str, value: Any) -> T:
        return self._check(name, value)


def described(schema: Schema) -> Callable[[Callable[[str, Any], T]], Described[T]]:
    """Say what a check takes."""
    return lambda check: Described(check, schema)


#: A token id as the key of an object, written in one way only: "7" and "07" would be two biases for one token.
_TOKEN_ID = re.compile(r"(?:0|[1-9][0-9]{0,9})")


def show(value: object) -> str:
    """The value for an error message, cut to a bearable length."""
    if value is None:
        return "null"
    try:
        return reprlib.repr(value)
    except ValueError:  # an int of thousands of digits
        return f"a huge {type(value).__name__}"


def field_of(name: str, key: str) -> str:
    """The name of a field that a client has put into a parameter, cut to a bearable length."""
    return f"{name}.{key[:64]}"


#: Before the name of a parameter: what is wrong is a key of the object that it is.
KEY_OF = "a key of "


def _param(name: str) -> str:
    """The parameter that is wrong, as clients look for it."""
    return name.removeprefix(KEY_OF)


def wrong_type(name: str, wanted: str, value: object) -> RequestError:
    found = "null" if value is None else f"{type(value).__name__} {show(value)}"
    return RequestError(f"{name} must be {wanted}, not {found}", param=_param(name), code="invalid_type")


def wrong_value(name: str, wanted: str, value: object) -> RequestError:
    return RequestError(f"{name} must be {wanted}, not {show(value)}", param=_param(name), code="invalid_value")


def too_many(name: str, most: int, value: Sized) -> RequestError:
    message = f"{name} may have up to {most} entries, not {len(value)}"
    return RequestError(message, param=_param(name), code="invalid_value")


def is_int(value: object) -> bool:
    """JSON's integers; true and false are none."""
    return type(value) is int


@described({"type": "boolean"})
def boolean(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise wrong_type(name, "true or false", value)
    return value


def integer(low: int, high: int | None = None) -> Described[int]:
    """An integer in [low, high]."""
    wanted = f"an integer of at least {low}" if high is None else f"an integer from {low} to {high}"
    limits = {"minimum": low} | ({} if high is None else {"maximum": high})

    @described({"type": "integer", **limits})
    def check(name: str, value: Any) -> int:
        if not is_int(value):
            raise wrong_type(name, wanted, value)
        if value < low or (high is not None and value > high):
            raise wrong_value(name, wanted, value)
        return int(value)

    return check


def number(low: float, high: float, *, above: bool = False) -> Described[float]:
    """A finite number in [low, high], or in (low, high] with `above`."""
    wanted = f"a number above {low:g} and at most {high:g}" if above else f"a number from {low:g} to {high:g}"

    @described({"type": "number", "exclusiveMinimum" if above else "minimum": low, "maximum": high})
    def check(name: str, value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise wrong_type(name, wanted, value)
        # Compared before the conversion to float, which overflows for a huge int; NaN fails every comparison.
        if not low <= value <= high or (above and value == low) or not math.isfinite(value):
            raise wrong_value(name, wanted, value)
        return float(value)

    return check


def text(least: int, most: int | None = None) -> Described[str]:
    """A string of `least` to `most` characters that can be encoded as UTF-8."""
    limit = f"of at least {least} characters" if most is None else f"of {least} to {most} characters"
    limits = {"minLength": least} | ({} if most is None else {"maxLength": most})

    @described({"type": "string", **limits})
    def check(name: str, value: Any) -> str:
        if not isinstance(value, str):
            raise wrong_type(name, "a string", value)
        if len(value) < least or (most is not None and len(value) > most):
            message = f"{name} must be a string {limit}, not of {len(value)}"
            raise RequestError(message, param=name, code="invalid_value")
        return encodable(name, value)

    return check


def encodable(name: str, value: str) -> str:
    """Refuse half surrogate pairs, which json lets through and no tokenizer takes."""
    try:
        value.encode()
    except UnicodeEncodeError as error:
        message = f"{name} holds half of a surrogate pair at character {error.start}, which is no character"
        raise RequestError(message, param=name, code="invalid_value") from None
    return value


def one_or_many_texts(most: int, longest: int) -> Described[tuple[str, ...]]:
    """A non-empty string or a list of up to `most`, each of up to `longest` characters; kept as a tuple."""
    one = text(1, longest)

    @described({"anyOf": [one.schema, {"type": "array", "items": one.schema, "maxItems": most}]})
    def check(name: str, value: Any) -> tuple[str, ...]:
        values = [value] if isinstance(value, str) else value
        if not isinstance(values, list):
            raise wrong_type(name, f"a string or a list of up to {most} strings", value)
        if len(values) > most:
            raise too_many(name, most, values)
        names = [name] if isinstance(value, str) else [f"{name}[{index}]" for index in range(len(values))]
        return tuple(dict.fromkeys(map(one, names, values)))

    return check


def one_of(values: Mapping[str, Any]) -> Described[Any]:
    """One of these names; kept as what it stands for."""
    wanted = f"one of {', '.join(values)}"

    @described({"type": "string", "enum": list(values)})
    def check(name: str, value: Any) -> Any:
        if not isinstance(value, str):
            raise wrong_type(name, wanted, value)
        if value not in values:
            raise wrong_value(name, wanted, value)
        return values[value]

    return check


def token_ids(most: int | None = None) -> Described[tuple[int, ...]]:
    """A list of integers; whether they are in the vocabulary is seen when the tokenizer is at hand."""
    limits = {} if most is None else {"maxItems": most}

    @described({"type": "array", "items": {"type": "integer", "minimum": 0}, **limits})
    def check(name: str, value: Any) -> tuple[int, ...]:
        if not isinstance(value, list):
            raise wrong_type(name, "a list of token ids", value)
        if most is not None and len(value) > most:
            raise too_many(name, most, value)
        for index, item in enumerate(value):
            if not is_int(item):
                raise wrong_type(f"{name}[{index}]", "a token id (an integer)", item)
        return tuple(value)

    return check


def biases(most: int, low: float, high: float) -> Described[tuple[tuple[int, float], ...]]:
    """An object of up to `most` numbers in [low, high] by token id, which JSON writes as a string; kept as pairs."""
    number_check = number(low, high)
    keys = {"propertyNames": {"pattern": f"^{_TOKEN_ID.pattern}$"}, "maxProperties": most}

    @described({"type": "object", "additionalProperties": number_check.schema, **keys})
    def check(name: str, value: Any) -> tuple[tuple[int, float], ...]:
        if not isinstance(value, dict):
            raise wrong_type(name, "an object of numbers by token id", value)
        if len(value) > most:
            raise too_many(name, most, value)
        for key in value:
            if not _TOKEN_ID.fullmatch(key):
                raise wrong_value(f"{KEY_OF}{name}", "a token id", key)
        return tuple((int(key), number_check(f"{name}.{key}", bias)) for key, bias in value.items())

    return check


def text_map(most: int, longest_key: int, longest_value: int) -> Described[dict[str, str]]:
    """An object of up to `most` strings by string."""
    key_check, value_check = text(1, longest_key), text(0, longest_value)
    keys = {"propertyNames": {"minLength": 1, "maxLength": longest_key}, "maxProperties": most}

    @described({"type": "object", "additionalProperties": value_check.schema, **keys})
    def check(name: str, value: Any) -> dict[str, str]:
        if not isinstance(value, dict):
            raise wrong_type(name, "an object of strings", value)
        if len(value) > most:
            raise too_many(name, most, value)
        for key, item in value.items():
            key_check(f"{KEY_OF}{name}", key)
            value_check(f"{name}.{key}", item)
        return dict(value)

    return check
