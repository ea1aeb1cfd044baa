"""What may be asked of files and batches: every parameter of the official client is taken or refused by its name."""

from __future__ import annotations

import inspect
import re
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from openai.resources import batches, files

from prelay_api.batch_order import batch_order, order_schema, window, window_name
from prelay_api.routes import batches as batch_routes
from prelay_api.routes import files as file_routes
from prelay_api.upload import _NOT_KEPT
from prelay_text.errors import RequestError

GOOD = {"input_file_id": "file-1", "endpoint": "/v1/completions", "completion_window": "24h"}


def parameters_of(method: Any) -> set[str]:
    """What the client sends of its own: the rest is for its transport."""
    transport = {"self", "extra_headers", "extra_query", "extra_body", "timeout"}
    return set(inspect.signature(method).parameters) - transport


def test_every_parameter_of_a_batch_is_known() -> None:
    for name in parameters_of(batches.Batches.create) - set(order_schema()["properties"]):
        with pytest.raises(RequestError) as refused:
            batch_order({**GOOD, name: 1})
        assert (refused.value.code, refused.value.param) == ("unsupported_parameter", name)
        assert batch_order({**GOOD, name: None})


def test_every_parameter_of_a_file_is_known() -> None:
    assert parameters_of(files.Files.create) == {"file", "purpose", *_NOT_KEPT}


def test_every_parameter_of_the_lists_is_known() -> None:
    assert parameters_of(files.Files.list) == set(file_routes._QUERY)
    assert parameters_of(batches.Batches.list) == set(batch_routes._QUERY)


def test_an_order_is_read() -> None:
    order = batch_order({**GOOD, "metadata": {"a": "b"}})
    assert (order.input_file_id, order.endpoint, order.window_s) == ("file-1", "/v1/completions", 86400)
    assert order.metadata == {"a": "b"}
    assert batch_order({**GOOD, "metadata": None}).metadata == {}


@given(st.integers(1, 30 * 1440))
def test_a_window_s_name_is_a_window(minutes: int) -> None:
    assert window("w", window_name(minutes * 60)) == minutes * 60


@given(st.text(max_size=8))
def test_other_words_are_no_window(words: str) -> None:
    assume(re.fullmatch("[1-9][0-9]*[mhd]", words) is None)
    with pytest.raises(RequestError, match="w must be a time from"):
        window("w", words)


@pytest.mark.parametrize("body", [None, [], "x", 1])
def test_what_is_no_object_is_refused(body: object) -> None:
    with pytest.raises(RequestError, match="must be a JSON object"):
        batch_order(body)
