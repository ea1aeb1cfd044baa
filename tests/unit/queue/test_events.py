"""Live events are read as written, and anything else is refused with its bytes kept."""

from __future__ import annotations

from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prelay_queue.errors import BadMessageError
from prelay_queue.events import EndedEvent, LiveEvent, PreemptedEvent, RequeuedEvent, TokensEvent, decode_live

counts = st.integers(0, 2**31)
words = st.text("abc/0-", min_size=1, max_size=8)
events: st.SearchStrategy[LiveEvent] = st.one_of(
    st.builds(TokensEvent, words, counts, counts, st.lists(counts, min_size=1, max_size=5).map(tuple)),
    st.builds(PreemptedEvent, words, counts, words),
    st.builds(RequeuedEvent, words, counts, counts),
    st.builds(EndedEvent, words, counts, counts, words, words),
)


def _item(event: LiveEvent) -> list[Any]:
    """As the Lua library writes it."""
    match event:
        case TokensEvent(job, epoch, seq, ids):
            return ["t", job, epoch, seq, ids]
        case PreemptedEvent(job, epoch, reason):
            return ["p", job, epoch, reason]
        case RequeuedEvent(job, epoch, resume):
            return ["r", job, epoch, resume]
        case EndedEvent(job, epoch, count, reason, error):
            return ["e", job, epoch, count, reason, error]


@given(st.lists(events, max_size=5))
def test_events_come_back_as_the_scripts_write_them(written: list[LiveEvent]) -> None:
    assert decode_live(orjson.dumps([_item(event) for event in written])) == written


@given(st.binary(max_size=100))
def test_bytes_raise_only_our_error_and_are_kept(raw: bytes) -> None:
    kept = raw
    read = []
    try:
        read = decode_live(raw)
    except BadMessageError as error:
        kept = error.raw
    assert kept == raw
    assert read == []  # the only well-formed entry that random bytes find


@pytest.mark.parametrize(
    "item",
    [
        ["t", "j", 1, 0],
        ["t", "j", 1, 0, [1], 2],
        ["t", "j", 1, 0, 5],
        ["p", "j", 1],
        ["r", "j", 1],
        ["e", "j", 1, 3, "stop"],
        ["x", "j", 1, 0],
        ["t"],
        [],
        7,
        None,
    ],
)
def test_an_event_of_the_wrong_form_spoils_the_entry(item: object) -> None:
    raw = orjson.dumps([["p", "j", 1, "kv"], item])
    with pytest.raises(BadMessageError) as caught:
        decode_live(raw)
    assert caught.value.raw == raw
