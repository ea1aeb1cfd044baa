"""The shapes on the OpenAPI page are those that the renderer makes: all of them, and no others."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

import jsonschema_rs
import orjson
import pytest

from prelay_text.render import Choice, Part, Renderer, Usage
from prelay_text.reports import Likely, TokenReport
from prelay_text.shapes import SHAPES

USAGE = Usage(5, 9, 3)
FIRST = TokenReport(Likely("a", None, b"a"), (), 0)
NEXT = TokenReport(Likely("é", -0.5, "é".encode()), (Likely("b", -0.1, b"b"), Likely("é", -0.5, "é".encode())), 1)
PROMPT_LOGPROBS: list[Any] = [None, {"7": {"logprob": -1.5, "rank": 2, "decoded_token": "x"}}]


def parts(chat: bool) -> Iterator[Part]:
    yield Part("")
    yield Part("aé", (NEXT,) if chat else (FIRST, NEXT), (1, 2))


def renderers(chat: bool) -> Iterator[Renderer]:
    for usage, ids, tier in product((False, True), (False, True), (None, "default") if chat else (None,)):
        yield Renderer(chat, "req-1", 1_700_000_000, "m", "fp", include_usage=usage, token_ids=ids, service_tier=tier)


def answers(chat: bool) -> Iterator[bytes]:
    for render, part, finish, told in product(
        renderers(chat), parts(chat), ("stop", "length"), (None, PROMPT_LOGPROBS)
    ):
        choices = [Choice(n, part, finish, (1, 2), told) for n in range(2)]
        yield render.answer(choices, USAGE)


def chunks(chat: bool) -> Iterator[bytes]:
    for render, part in product(renderers(chat), parts(chat)):
        yield render.first_chunk(0, (1, 2), USAGE) or render.usage_chunk(USAGE)
        yield render.text_chunk(0, part, None)
        yield render.finish_chunk(0, "stop", part, USAGE)
        yield render.usage_chunk(USAGE)


def made(name: str) -> list[Any]:
    chat = name.startswith("Chat")
    return [orjson.loads(raw) for raw in (chunks if name.endswith("Chunk") else answers)(chat)]


def places(value: Any, at: str = "") -> Iterator[str]:
    """The paths of all that a JSON value holds; lists count as one place."""
    yield at
    for name, inner in value.items() if isinstance(value, dict) else ():
        yield from places(inner, f"{at}/{name}")
    for inner in value if isinstance(value, list) else ():
        yield from places(inner, f"{at}/*")


def described(schema: dict[str, Any], at: str = "") -> Iterator[str]:
    """The paths of all that a schema names."""
    yield at
    for name, inner in schema.get("properties", {}).items():
        yield from described(inner, f"{at}/{name}")
    if "items" in schema:
        yield from described(schema["items"], f"{at}/*")
    for inner in schema.get("anyOf", ()):
        yield from described(inner, at)


@pytest.mark.parametrize("name", SHAPES)
def test_all_that_is_rendered_fits_its_shape(name: str) -> None:
    shape = jsonschema_rs.validator_for(SHAPES[name])
    for value in made(name):
        shape.validate(value)


@pytest.mark.parametrize("name", SHAPES)
def test_all_that_a_shape_names_is_rendered(name: str) -> None:
    found = {place for value in made(name) for place in places(value)}
    assert set(described(SHAPES[name])) <= found


@pytest.mark.parametrize("name", SHAPES)
def test_a_shape_takes_no_field_more_and_none_less(name: str) -> None:
    shape = jsonschema_rs.validator_for(SHAPES[name])
    value = next(each for each in made(name) if each["choices"])
    assert not shape.is_valid({**value, "more": 1})
    assert not shape.is_valid({**value, "choices": [{**value["choices"][0], "more": 1}]})
    assert not shape.is_valid({key: each for key, each in value.items() if key != "created"})
    other = "Completion" if name.startswith("Chat") else "ChatCompletion"
    assert not any(shape.is_valid(each) for each in made(other) if each["choices"])
