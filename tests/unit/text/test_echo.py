from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prelay_queue.note import Note, TokenLogprobs
from prelay_text.echo import echo_of
from prelay_text.pieces import token_string
from prelay_text.tokenizer import Tokenizer

TEXTS = ["the quick brown fox", "日本 語\n\n😀", "café  two  spaces", "x", "the</s>dog", "<s>the"]


@pytest.mark.parametrize("text", TEXTS)
def test_a_text_is_repeated_as_it_was_given(byte_level: Tokenizer, text: str) -> None:
    echo = echo_of(byte_level.encode(text), text, byte_level)
    assert echo.text == text
    assert len(echo.offsets) == len(echo.ids)


@pytest.mark.parametrize("text", ["the dog", "<s>the dog", "the <s>dog"])
def test_what_the_tokenizer_puts_in_front_is_not_repeated(model_folder: Callable[..., Path], text: str) -> None:
    tokenizer = Tokenizer.load(model_folder(bos=True))
    ids = tokenizer.encode(text, add_special_tokens=True)
    assert ids[0] == tokenizer.token_id("<s>")
    echo = echo_of(ids, text, tokenizer)
    assert echo.text == (text if not text.startswith("<s>") else "<s>" + text)
    assert echo.offsets[0] == 0


def test_special_tokens_among_ids_are_spelled_out(byte_level: Tokenizer) -> None:
    ids = [1, *byte_level.encode("the"), 2]
    assert echo_of(ids, None, byte_level).text == "<s>the</s>"


@given(ids=st.lists(st.integers(0, 419), min_size=1, max_size=12))
def test_offsets_never_fall_and_lead_to_the_tokens_text(byte_level: Tokenizer, ids: list[int]) -> None:
    echo = echo_of(ids, None, byte_level)
    assert all(before <= after for before, after in pairwise(echo.offsets))
    for token, offset in zip(ids, echo.offsets, strict=True):
        shown = token_string(byte_level, token)
        if "\\x" not in shown and "\ufffd" not in echo.text:
            assert echo.text[offset:].startswith(shown)


def test_a_prompt_that_ends_inside_a_character_ends_with_one_replacement(byte_level: Tokenizer) -> None:
    ids = [token for byte in "日".encode()[:2] for token in _of_byte(byte_level, byte)]
    assert echo_of(ids, None, byte_level).text == "\ufffd"


def _of_byte(tokenizer: Tokenizer, byte: int) -> list[int]:
    return next([token] for token in range(tokenizer.vocab_size) if tokenizer.token_bytes(token) == bytes([byte]))


def test_each_token_but_the_first_has_its_logprob_and_no_more_of_the_likeliest_than_asked_for(
    byte_level: Tokenizer,
) -> None:
    ids = byte_level.encode("the dog")
    said = [TokenLogprobs(-float(place), 1, ((5, -0.1), (6, -0.2))) for place in range(1, len(ids))]
    reports = echo_of(ids, "the dog", byte_level).reports(byte_level, Note(prompt=tuple(said)), 1)
    assert [report.chosen.logprob for report in reports] == [None, *(each.logprob for each in said)]
    assert [len(report.top) for report in reports] == [0] + [1] * (len(ids) - 1)
    assert "".join(report.chosen.text for report in reports) == "the dog"
