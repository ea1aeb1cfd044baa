from __future__ import annotations

from functools import cache
from itertools import chain

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prelay_text.stops import StopMatch, StopMatcher, StopScanner
from prelay_text.tokenizer import Tokenizer

TEXTS = ["the dog, the dog", "日本語 日本", "😀😀 emoji", "a\n\nb", "ababac", "naïve café"]


@cache
def ids_of(tokenizer: Tokenizer) -> st.SearchStrategy[list[int]]:
    one = st.integers(0, tokenizer.vocab_size - 1).map(lambda token: [token])
    text = st.sampled_from(TEXTS).map(tokenizer.encode)
    return st.lists(st.one_of(one, text), min_size=1, max_size=10).map(lambda parts: list(chain(*parts)))


@st.composite
def stops_for(draw: st.DrawFn, text: str) -> list[str]:
    """Stop strings that tend to occur: parts of the text, some with another character behind."""
    stops = []
    for _ in range(draw(st.integers(1, 3))):
        start = draw(st.integers(0, max(len(text) - 1, 0)))
        part = text[start : start + draw(st.integers(1, 6))] + draw(st.sampled_from(["", "", "x", "a"]))
        if part and "\ufffd" not in part:
            stops.append(part)
    return stops or ["ab"]


def naive_match(tokenizer: Tokenizer, ids: list[int], stops: list[str]) -> tuple[int, int] | None:
    """(tokens up to the one that completes a stop string, characters before the earliest), the slow way."""
    for count in range(1, len(ids) + 1):
        text = tokenizer.decode(ids[:count])
        if found := [text.find(stop) for stop in stops if stop in text]:
            return count, min(found)
    return None


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_the_match_is_that_of_looking_at_the_whole_text_after_every_token(
    tokenizer: Tokenizer, data: st.DataObject
) -> None:
    ids = data.draw(ids_of(tokenizer))
    stops = data.draw(stops_for(tokenizer.decode(ids)))
    matcher = StopMatcher(stops, tokenizer)
    found = None
    for count, token in enumerate(ids, 1):
        if match := matcher.push(token):
            found = (count, match.start)
            break
    assert found == naive_match(tokenizer, ids, stops)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_what_is_held_back_is_exactly_the_longest_beginning_of_a_stop(data: st.DataObject) -> None:
    text = data.draw(st.text("ab", max_size=12))
    stops = data.draw(st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=3))
    scanner = StopScanner(stops)
    for index, char in enumerate(text, 1):
        if scanner.scan(char):
            break
        seen = text[:index]
        ends = [n for stop in stops for n in range(len(stop)) if seen.endswith(stop[:n])]
        assert scanner.held == max(ends)


def test_the_earliest_of_two_stops_that_one_token_completes_wins() -> None:
    assert StopScanner(["b", "abc"]).scan("xabc") == StopMatch(1, "abc")


def test_a_stop_that_is_complete_does_not_wait_for_an_earlier_one() -> None:
    scanner = StopScanner(["abc", "b"])
    assert scanner.scan("a") is None
    assert scanner.scan("b") == StopMatch(1, "b")


def test_a_stop_that_overlaps_itself_is_found() -> None:
    scanner = StopScanner(["aab"])
    assert [scanner.scan(char) for char in "aaab"] == [None, None, None, StopMatch(1, "aab")]


def test_a_line_break_as_byte_token_stops_at_once(llama: Tokenizer) -> None:
    matcher = StopMatcher(["\n"], llama)
    assert matcher.push(llama.token_id("▁the") or 0) is None
    assert matcher.push(llama.token_id("<0x0A>") or 0) == StopMatch(3, "\n")


def test_the_text_of_a_special_token_as_stop_matches_that_token(tokenizer: Tokenizer) -> None:
    special = tokenizer.token_id("<|end|>") or 0
    matcher = StopMatcher(["<|end|>"], tokenizer)
    ids = tokenizer.encode("dog")
    assert [matcher.push(token) for token in ids] == [None] * len(ids)
    assert matcher.push(special) == StopMatch(len(tokenizer.decode(ids)), "<|end|>")


def test_another_special_token_does_not_stop(tokenizer: Tokenizer) -> None:
    matcher = StopMatcher(["<|end|>"], tokenizer)
    assert matcher.push(tokenizer.token_id("<s>") or 0) is None


def test_text_that_spells_out_a_special_token_matches_too(byte_level: Tokenizer) -> None:
    matcher = StopMatcher(["<|end|>"], byte_level)
    spelled = [byte_level.token_id(char) or 0 for char in "<|end|>"]
    assert [matcher.push(token) for token in spelled][-1] == StopMatch(0, "<|end|>")


@pytest.mark.parametrize(("least", "ends_at"), [(0, 0), (1, 1), (2, 2), (3, 3), (4, None)])
def test_what_the_first_tokens_complete_does_not_count(byte_level: Tokenizer, least: int, ends_at: int | None) -> None:
    letter, special = byte_level.token_id("x") or 0, byte_level.token_id("<|end|>") or 0
    matcher = StopMatcher(["x"], byte_level, stop_token_ids=(special,), min_tokens=least)
    ended = [matcher.push(token) is not None for token in (letter, special, letter, special)]
    assert ended == [ends_at is not None and place >= ends_at for place in range(4)]


def test_a_stop_that_begins_in_the_first_tokens_and_ends_after_them_counts(byte_level: Tokenizer) -> None:
    ids = [byte_level.token_id(char) or 0 for char in "dog"]
    for least, match in ((2, StopMatch(0, "dog")), (3, None)):
        matcher = StopMatcher(["dog"], byte_level, min_tokens=least)
        assert [matcher.push(token) for token in ids][-1] == match


def test_nothing_changes_after_a_match(byte_level: Tokenizer) -> None:
    matcher = StopMatcher(["dog"], byte_level)
    for token in byte_level.encode("the dog"):
        match = matcher.push(token)
    assert match is not None
    assert matcher.push(byte_level.encode(" dog")[0]) == match
    assert matcher.text == ""


@pytest.mark.parametrize("count", [1, 16])
def test_a_long_text_costs_the_same_for_every_token(byte_level: Tokenizer, count: int) -> None:
    """Each token is looked up once and each character scanned once, however long the text has grown."""
    looked_up: list[int] = []

    class Counting:
        """A tokenizer that notes which pieces are asked for, and has no way to decode a whole."""

        decoding, special_ids = byte_level.decoding, byte_level.special_ids

        def token_id(self, token: str) -> int | None:
            return byte_level.token_id(token)

        def piece(self, token: int, first: bool = False) -> object:
            looked_up.append(token)
            return byte_level.piece(token, first)

    stops = [f"never{index}" for index in range(count)]
    matcher = StopMatcher(stops, Counting())  # type: ignore[arg-type]
    ids = byte_level.encode("the quick brown fox never jumps ") * 200
    for token in ids:
        assert matcher.push(token) is None
    assert looked_up == ids
