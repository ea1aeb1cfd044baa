"""The JSON Schema of a request: what it refuses the checks refuse, and every parameter has one."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prelay_text import checks
from prelay_text.errors import RequestError
from prelay_text.parameters import Route, parameters_of
from prelay_text.schema import request_schema, schema_of
from prelay_text.tokenize import detokenize_schema, tokenize_schema

CHECKS: dict[str, checks.Described[Any]] = {
    "boolean": checks.boolean,
    "integer": checks.integer(-1, 9),
    "open integer": checks.integer(0),
    "number": checks.number(0, 2),
    "number above": checks.number(0, 1, above=True),
    "text": checks.text(1, 4),
    "texts": checks.one_or_many_texts(2, 4),
    "one of": checks.one_of({"a": 1, "b": 2}),
    "ids": checks.token_ids(2),
    "biases": checks.biases(2, -1, 1),
    "map": checks.text_map(2, 3, 4),
}

_inner = (
    st.none() | st.booleans() | st.integers(-3, 12) | st.floats(-2, 3) | st.sampled_from(["", "a", "b", "7", "abcde"])
)
_values = (
    _inner | st.lists(_inner, max_size=3) | st.dictionaries(st.sampled_from(["", "a", "7", "long"]), _inner, max_size=3)
)


KINDS = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array", dict: "object"}


def fits(schema: dict[str, Any], value: Any) -> bool:
    """The few words of JSON Schema that ours are made of. An integer is one only without a point, as it is here."""
    if "anyOf" in schema:
        return any(fits(each, value) for each in schema["anyOf"])
    kind = KINDS.get(type(value))
    wanted = schema["type"]
    if kind != wanted and not (wanted == "number" and kind == "integer"):
        return False
    match kind:
        case "integer" | "number":
            low, above = schema.get("minimum", -1e300), schema.get("exclusiveMinimum", -1e300)
            return bool(low <= value <= schema.get("maximum", 1e300) and value > above)
        case "string":
            return schema.get("minLength", 0) <= len(value) <= schema.get("maxLength", 99) and (
                "enum" not in schema or value in schema["enum"]
            )
        case "array":
            return len(value) <= schema.get("maxItems", 99) and all(fits(schema["items"], item) for item in value)
        case "object":
            names = schema["propertyNames"]
            good = (
                name.isdecimal() if "pattern" in names else names["minLength"] <= len(name) <= names["maxLength"]
                for name in value
            )
            inner = (fits(schema["additionalProperties"], item) for item in value.values())
            return len(value) <= schema["maxProperties"] and all(good) and all(inner)
    return True


@pytest.mark.parametrize("name", CHECKS)
@given(value=_values)
def test_a_check_takes_what_its_schema_says(name: str, value: Any) -> None:
    check = CHECKS[name]
    try:
        check("x", value)
    except RequestError:
        taken = False
    else:
        taken = True
    # Which ids the vocabulary has is seen later.
    if name == "ids" and isinstance(value, list) and any(type(item) is int and item < 0 for item in value):
        return
    assert taken == fits(check.schema, value), value


@pytest.mark.parametrize("route", [Route.COMPLETION, Route.CHAT])
def test_every_implemented_parameter_says_what_it_takes(route: Route) -> None:
    rows = parameters_of(route)
    schema = request_schema(route)
    silent = [row.name for row in rows.values() if row.check is not None and not schema_of(row)]
    assert not silent, "say it in STRUCTURED, or write the check with `described`"
    assert set(schema["properties"]) == {row.name for row in rows.values() if row.check is not None}
    assert schema["required"] == [row.name for row in rows.values() if row.required]
    json.dumps(schema, allow_nan=False)


def test_an_optional_parameter_may_be_null_and_has_its_default() -> None:
    shown = request_schema(Route.COMPLETION)["properties"]
    assert shown["temperature"] == {
        "anyOf": [{"type": "number", "minimum": 0, "maximum": 2}, {"type": "null"}],
        "default": 1.0,
    }
    assert {"type": "null"} not in shown["prompt"]["anyOf"]


def test_the_routes_about_tokens_have_schemas_too() -> None:
    completion, chat = tokenize_schema()["anyOf"]
    assert set(completion["properties"]) == {"model", "prompt", "add_special_tokens", "return_token_strs"}
    assert {"model", "messages", "add_generation_prompt", "return_token_strs"} <= set(chat["properties"])
    assert (completion["required"], chat["required"]) == (["prompt"], ["messages"])
    assert detokenize_schema()["required"] == ["tokens"]
