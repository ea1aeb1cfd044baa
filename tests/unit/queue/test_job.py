"""Job messages survive the trip through bytes, and bytes that are no job say so."""

from __future__ import annotations

from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prelay_queue.errors import BadMessageError, QueueError
from prelay_queue.job import JobSpec, Priority, Sampling

token_ids = st.integers(0, 2**31 - 1)
samplings = st.builds(
    Sampling,
    max_tokens=st.integers(1, 2**20),
    temperature=st.floats(0, 2),
    top_p=st.floats(0, 1, exclude_min=True),
    top_k=st.integers(0, 1000),
    seed=st.integers(0, 2**64 - 1),
    stop=st.lists(st.text(st.characters(exclude_categories=["Cs"]), min_size=1), max_size=4).map(tuple),
    stop_token_ids=st.lists(token_ids, max_size=4).map(tuple),
    ignore_eos=st.booleans(),
    min_p=st.floats(0, 1),
    repetition_penalty=st.floats(0.1, 10),
    presence_penalty=st.floats(-2, 2),
    frequency_penalty=st.floats(-2, 2),
    logit_bias=st.lists(st.tuples(token_ids, st.floats(-100, 100)), max_size=3).map(tuple),
    bad_words=st.lists(st.lists(token_ids, min_size=1, max_size=3).map(tuple), max_size=3).map(tuple),
    min_tokens=st.integers(0, 2**20),
)
specs = st.builds(
    JobSpec,
    id=st.from_regex(r"[a-z0-9-]{1,20}/[0-9]{1,2}", fullmatch=True),
    prompt_ids=st.lists(token_ids, max_size=50).map(tuple),
    sampling=samplings,
    priority=st.sampled_from(Priority),
)
json_values: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"]), max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("abc", max_size=3), inner, max_size=3),
    max_leaves=6,
)  # fmt: skip


@given(specs)
def test_a_spec_comes_back_as_it_was_written(spec: JobSpec) -> None:
    assert JobSpec.decode(spec.encode()) == spec


@given(st.binary(max_size=200))
def test_bytes_that_are_no_spec_raise_and_are_kept(raw: bytes) -> None:
    with pytest.raises(BadMessageError) as caught:
        JobSpec.decode(raw)
    assert caught.value.raw == raw


def _paths(data: dict[str, Any]) -> list[tuple[str, ...]]:
    return [(key,) for key in data] + [("sampling", key) for key in data["sampling"]]


@given(specs, st.data())
def test_a_spec_with_one_field_replaced_is_refused_or_still_well_typed(spec: JobSpec, data: st.DataObject) -> None:
    message = orjson.loads(spec.encode())
    path = data.draw(st.sampled_from(_paths(message)))
    holder = message if len(path) == 1 else message[path[0]]
    holder[path[-1]] = data.draw(json_values)
    try:
        read = JobSpec.decode(orjson.dumps(message))
    except BadMessageError:
        return
    # What gets through must be what the worker's arithmetic expects: a wrong type would crash it mid batch.
    assert isinstance(read.id, str)
    assert all(type(token) is int for token in read.prompt_ids)
    s = read.sampling
    assert type(s.max_tokens) is int
    assert type(s.seed) is int
    assert type(s.top_k) is int
    assert type(s.ignore_eos) is bool
    assert type(s.min_tokens) is int
    numbers = (s.temperature, s.top_p, s.min_p, s.repetition_penalty, s.presence_penalty, s.frequency_penalty)
    assert all(isinstance(number, (int, float)) for number in numbers)
    assert all(type(token) is int and isinstance(bias, (int, float)) for token, bias in s.logit_bias)
    assert all(word and all(type(token) is int for token in word) for word in s.bad_words)
    assert all(isinstance(word, str) for word in s.stop)
    assert all(type(token) is int for token in s.stop_token_ids)


@given(specs, st.data())
def test_a_spec_that_lacks_a_field_is_refused(spec: JobSpec, data: st.DataObject) -> None:
    message = orjson.loads(spec.encode())
    path = data.draw(st.sampled_from([("id",), ("prompt_ids",), ("sampling",), ("priority",), ("sampling", "stop")]))
    del (message if len(path) == 1 else message[path[0]])[path[-1]]
    with pytest.raises(BadMessageError):
        JobSpec.decode(orjson.dumps(message))


def test_a_bad_message_is_an_error_of_the_queue_and_shows_only_the_start_of_it() -> None:
    error = BadMessageError(b"x" * 10_000, "why")
    assert isinstance(error, QueueError)
    assert len(str(error)) < 400
    assert len(error.raw) == 10_000


def test_the_end_of_the_id_is_the_choice() -> None:
    assert JobSpec("cmpl-a/b/12", (1,), Sampling(1)).choice == 12
