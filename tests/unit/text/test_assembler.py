from __future__ import annotations

import time
from functools import cache
from itertools import chain
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prelay_queue.job import FinishReason
from prelay_text.assembler import Assembler, Delta
from prelay_text.errors import RewindError
from prelay_text.stops import StopMatch
from prelay_text.tokenizer import Tokenizer

TEXTS = ["the dog, the dog", "日本語 日本", "😀😀 emoji", "a\n\nb", "ababac", "naïve café"]
Stops = list[str]


@cache
def ids_of(tokenizer: Tokenizer) -> st.SearchStrategy[list[int]]:
    one = st.integers(0, tokenizer.vocab_size - 1).map(lambda token: [token])
    text = st.sampled_from(TEXTS).map(tokenizer.encode)
    return st.lists(st.one_of(one, text), max_size=10).map(lambda parts: list(chain(*parts)))


@st.composite
def stops_for(draw: st.DrawFn, text: str) -> Stops:
    """None, or stop strings that tend to occur, whole or but for their end."""
    stops = []
    for _ in range(draw(st.integers(0, 3))):
        start = draw(st.integers(0, max(len(text) - 1, 0)))
        part = text[start : start + draw(st.integers(1, 6))] + draw(st.sampled_from(["", "", "x", "a"]))
        if part and "\ufffd" not in part:
            stops.append(part)
    return stops


def expected_text(tokenizer: Tokenizer, ids: list[int], stops: Stops, ends: tuple[int, ...] = ()) -> str:
    """The text of the answer, found the slow way: decode the whole after every token."""
    for count, token in enumerate(ids, 1):
        if token in ends:
            return tokenizer.decode(ids[: count - 1])
        text = tokenizer.decode(ids[:count])
        if found := [text.find(stop) for stop in stops if stop in text]:
            return text[: min(found)]
    return tokenizer.decode(ids)


def text_of(*deltas: Delta | None) -> str:
    return "".join(delta.text for delta in deltas if delta is not None)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_the_deltas_make_up_the_text_however_the_ids_are_split(tokenizer: Tokenizer, data: st.DataObject) -> None:
    # Given random ids, stop strings, stop ids and cuts
    ids = data.draw(ids_of(tokenizer))
    stops = data.draw(stops_for(tokenizer.decode(ids)))
    ends = tuple(data.draw(st.lists(st.sampled_from(ids), max_size=1))) if ids else ()
    assembler = Assembler(tokenizer, stops, stop_token_ids=ends)
    text, rest = "", list(ids)
    # When they are pushed piece by piece
    while rest:
        size = data.draw(st.integers(1, len(rest)))
        text += text_of(assembler.push(rest[:size]))
        rest = rest[size:]
    text += text_of(assembler.finish(FinishReason.LENGTH))
    # Then the text is that of the whole
    assert text == expected_text(tokenizer, ids, stops, ends)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_rewinds_leave_no_trace_in_the_text(tokenizer: Tokenizer, data: st.DataObject) -> None:
    """Attempts that are cut off at random and continue with equal or other ids: one consistent text."""
    # Given an assembler and an answer
    answer = data.draw(ids_of(tokenizer))
    stops = data.draw(stops_for(tokenizer.decode(answer)))
    assembler, text = Assembler(tokenizer, stops), ""
    for _ in range(data.draw(st.integers(1, 4))):
        # When some of it arrives,
        end = data.draw(st.integers(len(assembler.ids), max(len(answer), len(assembler.ids))))
        text += text_of(assembler.push(answer[len(assembler.ids) : end]))
        assert assembler.ids == answer[:end]
        # the attempt is cut off,
        kept = data.draw(st.integers(assembler.delivered, len(assembler.ids)))
        assembler.rewind(kept)
        assert assembler.ids == answer[:kept]
        # and the next one goes on with the same ids or with others
        if data.draw(st.booleans()):
            answer = answer[:kept] + data.draw(ids_of(tokenizer))
    text += text_of(assembler.push(answer[len(assembler.ids) :]), assembler.finish(FinishReason.STOP))
    # Then the client has read the text of the ids that stand
    assert text == expected_text(tokenizer, answer, stops)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_delivered_is_the_least_count_that_the_text_handed_out_rests_on(
    tokenizer: Tokenizer, data: st.DataObject
) -> None:
    ids = data.draw(ids_of(tokenizer))
    stops = data.draw(stops_for(tokenizer.decode(ids)))
    assembler = Assembler(tokenizer, stops)
    text = text_of(*[assembler.push([token]) for token in ids])
    count = assembler.delivered

    def text_after(upto: int) -> str:
        return text_of(Assembler(tokenizer, stops).push(ids[:upto]))

    assert text_after(count) == text
    assert count == 0 or text_after(count - 1) != text


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_a_client_that_reconnects_at_the_cursor_gets_the_rest(tokenizer: Tokenizer, data: st.DataObject) -> None:
    ids = data.draw(ids_of(tokenizer))
    stops = data.draw(stops_for(tokenizer.decode(ids)))
    first = Assembler(tokenizer, stops)
    seen = text_of(first.push(ids[: data.draw(st.integers(0, len(ids)))]))
    # When another process is pushed the ids up to the cursor and drops that text
    second = Assembler(tokenizer, stops)
    second.push(ids[: first.delivered])
    rest = text_of(second.push(ids[first.delivered :]), second.finish(FinishReason.STOP))
    assert seen + rest == expected_text(tokenizer, ids, stops)


def test_a_token_whose_text_is_wholly_held_back_is_not_delivered(byte_level: Tokenizer) -> None:
    smile = [byte_level.token_id(char) or 0 for char in "ðŁĺĢ"]
    assembler = Assembler(byte_level)
    ids = byte_level.encode("dog")
    assert text_of(assembler.push([*ids, *smile[:3]])) == "dog"
    assert assembler.delivered == len(ids)
    # One token before it that gave no text is not delivered either, until text after it is
    assert assembler.push([smile[3]]) == Delta("😀", len(ids) + 4)


def test_tokens_that_may_begin_a_stop_string_are_held_back(byte_level: Tokenizer) -> None:
    letters = [byte_level.token_id(char) or 0 for char in "xabcy"]
    assembler = Assembler(byte_level, ["abcd"])
    assert assembler.push(letters[:1]) == Delta("x", 1)
    assert [assembler.push([token]) for token in letters[1:4]] == [None, None, None]
    assert assembler.delivered == 1
    assert assembler.push(letters[4:]) == Delta("abcy", 5)


def test_the_beginning_of_a_stop_that_never_completes_is_not_lost(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("the dog")
    text = tokenizer.decode(ids)
    assembler = Assembler(tokenizer, [text[-3:] + "never"])
    held = text_of(assembler.push(ids))
    assert text.startswith(held)
    assert held != text
    end = assembler.finish(FinishReason.LENGTH)
    assert held + end.text == text
    assert (end.delivered, end.finish) == (len(ids), FinishReason.LENGTH)


def test_a_stop_over_several_tokens_cuts_the_stream_and_the_whole_alike(byte_level: Tokenizer) -> None:
    ids = byte_level.encode("the quick brown fox jumps")
    one = Assembler(byte_level, ["ick brown f"])
    pieces = [one.push([token]) for token in ids]
    streamed = text_of(*pieces, one.finish(FinishReason.STOP))
    whole = Assembler(byte_level, ["ick brown f"])
    assert streamed == text_of(whole.push(ids), whole.finish(FinishReason.STOP)) == "the qu"
    assert one.match is not None


@pytest.mark.parametrize("family", ["byte_level", "llama"])
def test_a_stop_of_characters_of_several_bytes_is_found(family: str, request: pytest.FixtureRequest) -> None:
    tokenizer: Tokenizer = request.getfixturevalue(family)
    ids = tokenizer.encode("日本 語 dog")
    text = tokenizer.decode(ids)
    assembler = Assembler(tokenizer, ["語"])
    got = text_of(*[assembler.push([token]) for token in ids], assembler.finish(FinishReason.STOP))
    assert got == text[: text.index("語")]


def test_an_answer_that_begins_inside_a_character_has_no_more_replacements_streamed_than_whole(
    byte_level: Tokenizer,
) -> None:
    # Given a prompt that ended in 2 of 3 bytes of a character, so that the answer begins with the third
    third = byte_level.token_id("ª") or 0  # byte 0xAA, the end of 語
    ids = [third, *byte_level.encode("dog 日")[:-1]]
    whole = Assembler(byte_level)
    expected = text_of(whole.push(ids), whole.finish(FinishReason.LENGTH))
    one = Assembler(byte_level)
    streamed = text_of(*[one.push([token]) for token in ids], one.finish(FinishReason.LENGTH))
    assert streamed == expected == byte_level.decode(ids)
    assert expected.startswith("\ufffddog")


def test_special_tokens_give_no_text(tokenizer: Tokenizer) -> None:
    ids = [*tokenizer.encode("dog"), tokenizer.token_id("<|end|>") or 0, *tokenizer.eos_ids]
    assembler = Assembler(tokenizer)
    text = text_of(assembler.push(ids), assembler.finish(FinishReason.STOP))
    assert text == tokenizer.decode(tokenizer.encode("dog"))


def test_a_special_token_as_stop_string_ends_the_text(tokenizer: Tokenizer) -> None:
    dog = tokenizer.encode("dog")
    assembler = Assembler(tokenizer, ["<|end|>"])
    text = text_of(assembler.push([*dog, tokenizer.token_id("<|end|>") or 0, *dog]))
    assert text + assembler.finish(FinishReason.STOP).text == tokenizer.decode(dog)


def test_special_tokens_are_text_where_they_are_not_skipped(tokenizer: Tokenizer) -> None:
    ids = [*tokenizer.encode("the"), 1, *tokenizer.encode("dog"), 2]
    shown = Assembler(tokenizer, skip_special_tokens=False)
    text = shown.push(ids).text + shown.finish(FinishReason.STOP).text  # type: ignore[union-attr]
    assert text == tokenizer.decode(ids, skip_special_tokens=False)
    assert "<s>" in text


def test_a_stop_string_may_reach_over_a_special_token_that_is_shown(byte_level: Tokenizer) -> None:
    ids = [*byte_level.encode("the"), 1, *byte_level.encode("dog")]
    shown = Assembler(byte_level, ["e<s>d"], skip_special_tokens=False)
    shown.push(ids)
    shown.finish(FinishReason.STOP)
    assert shown.match is not None
    assert (shown.match.start, shown.match.stop) == (2, "e<s>d")
    hidden = Assembler(byte_level, ["e<s>d"])
    hidden.push(ids)
    assert hidden.match is None


def test_rewinding_what_was_delivered_is_refused_and_changes_nothing(byte_level: Tokenizer) -> None:
    ids = byte_level.encode("the dog")
    assembler = Assembler(byte_level)
    assembler.push(ids)
    for count in (0, assembler.delivered - 1, len(ids) + 1):
        with pytest.raises(RewindError, match=str(count)):
            assembler.rewind(count)
    assert assembler.ids == ids
    assembler.rewind(len(ids))


def test_an_ended_answer_takes_no_ids_and_no_rewind(byte_level: Tokenizer) -> None:
    assembler = Assembler(byte_level)
    first = assembler.finish(FinishReason.STOP)
    assert first == assembler.finish(FinishReason.LENGTH) == Delta("", 0, FinishReason.STOP)
    with pytest.raises(RewindError):
        assembler.push([1])
    with pytest.raises(RewindError):
        assembler.rewind(0)


def test_a_rewind_takes_a_match_back(byte_level: Tokenizer) -> None:
    ids = byte_level.encode("dog")
    assembler = Assembler(byte_level, ["dog"])
    assert assembler.push(ids) is None
    matched = assembler.match
    assert matched == StopMatch(0, "dog")
    assembler.rewind(0)
    assert assembler.match is None
    other = byte_level.encode("fox")
    assert text_of(assembler.push(other), assembler.finish(FinishReason.STOP)) == "fox"


def test_the_ten_thousandth_token_costs_about_what_the_first_did(tokenizer: Tokenizer) -> None:
    """Decoding the whole at every token would make the second half three times as slow as the first."""
    ids = (tokenizer.encode("the quick 日本語 brown dog, ") * 2000)[:20_000]
    assembler = Assembler(tokenizer, ["never comes", "dog!"])

    def seconds(part: list[int]) -> float:
        start = time.process_time()
        for token in part:
            assembler.push([token])
        return time.process_time() - start

    seconds(ids[:2000])
    first, second = seconds(ids[2000:10_000]), seconds(ids[10_000:18_000])
    assert second < 2 * first + 0.05


@pytest.mark.model
def test_the_demo_models_deltas_make_up_its_text(demo_model: Path) -> None:
    tokenizer = Tokenizer.load(demo_model)
    text = "Straße 日本語 😀 👩‍👩‍👧 naïve\n\n\tcafé — “quoted” text. End of it."
    ids = [*tokenizer.encode(text), *tokenizer.eos_ids]
    for stops, expected in (([], text), (["quoted”"], text[: text.index("quoted")]), (["<|im_end|>"], text)):
        assembler = Assembler(tokenizer, stops)
        deltas = [assembler.push([token]) for token in ids]
        assert text_of(*deltas, assembler.finish(FinishReason.STOP)) == expected
        assert not any("\ufffd" in delta.text for delta in deltas if delta)
