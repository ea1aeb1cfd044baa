"""Notes survive the wire, and what is no note is refused with its bytes."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prelay_queue.errors import BadMessageError
from prelay_queue.note import LEAST_LOGPROB, Note, TokenLogprobs

logprobs = st.builds(
    TokenLogprobs,
    st.floats(max_value=0, allow_infinity=False),
    st.integers(1, 2**17),
    st.lists(st.tuples(st.integers(0, 2**31), st.floats(max_value=0, allow_infinity=False)), max_size=5).map(tuple),
)
notes = st.builds(Note, st.none() | logprobs, st.lists(logprobs, max_size=4).map(tuple), st.integers(0, 10**6))


@given(notes)
def test_a_note_comes_back_as_it_was(note: Note) -> None:
    assert Note.decode(note.encode()) == note


def test_nothing_to_say_is_nothing() -> None:
    assert Note().encode() == ""
    assert Note.decode("") == Note()


def test_an_impossible_token_is_reported_with_a_number() -> None:
    raw = Note(TokenLogprobs(-math.inf, 7, ((3, -math.inf),))).encode()
    assert Note.decode(raw) == Note(TokenLogprobs(LEAST_LOGPROB, 7, ((3, LEAST_LOGPROB),)))


@pytest.mark.parametrize("raw", ["x", "[]", '{"lp":[1]}', '{"lp":[1,2,[[3]]]}', '{"prompt":3}', '{"cached":"many"}'])
def test_what_is_no_note_is_refused_with_its_bytes(raw: str) -> None:
    with pytest.raises(BadMessageError) as caught:
        Note.decode(raw)
    assert caught.value.raw == raw.encode()
