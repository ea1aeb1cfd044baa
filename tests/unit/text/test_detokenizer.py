from __future__ import annotations

import json
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prelay_text.decoding import parse_decoder
from prelay_text.detokenizer import Detokenizer, continues_text
from prelay_text.errors import ModelFilesError
from prelay_text.tokenizer import Tokenizer

TEXTS = ["the dog", "日本語 で", "😀 emoji 👩‍👩‍👧", "naïve  café\n\n", " leading", "", "Ωβ\t", "日本 z q", "<|end|>x"]


@cache
def ids_of(tokenizer: Tokenizer) -> st.SearchStrategy[list[int]]:
    """Random ids: any of the vocabulary and a few beyond it, pieces of real text, lone bytes."""
    one = st.integers(0, tokenizer.vocab_size + 2).map(lambda token: [token])
    text = st.sampled_from(TEXTS).map(tokenizer.encode)
    cut = st.tuples(text, st.integers(0, 6)).map(lambda pair: pair[0][pair[1] :])
    return st.lists(st.one_of(one, text, cut), max_size=12).map(lambda parts: list(chain(*parts)))


@settings(max_examples=60, deadline=None)
@given(data=st.data(), skip=st.booleans())
def test_text_pushed_token_by_token_equals_the_whole_decoding(
    tokenizer: Tokenizer, data: st.DataObject, skip: bool
) -> None:
    ids = data.draw(ids_of(tokenizer))
    detokenizer = Detokenizer(tokenizer, skip_special_tokens=skip)
    text = "".join(detokenizer.push(token) for token in ids) + detokenizer.flush()
    assert text == tokenizer.decode(ids, skip_special_tokens=skip)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_text_given_out_is_never_taken_back_whatever_follows(tokenizer: Tokenizer, data: st.DataObject) -> None:
    ids, more = data.draw(ids_of(tokenizer)), data.draw(ids_of(tokenizer))
    given_out = Detokenizer(tokenizer).extend(ids)
    assert tokenizer.decode(ids).startswith(given_out)
    assert tokenizer.decode(ids + more).startswith(given_out)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_pending_is_what_would_stand_if_the_text_ended_here(tokenizer: Tokenizer, data: st.DataObject) -> None:
    ids = data.draw(ids_of(tokenizer))
    detokenizer = Detokenizer(tokenizer)
    settled = detokenizer.extend(ids)
    rest = tokenizer.decode(ids)[len(settled) :]
    assert rest == detokenizer.pending or (detokenizer.pending == "" and rest.strip("\ufffd") == "")


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_text_that_continues_a_prompt_keeps_its_leading_space(tokenizer: Tokenizer, data: st.DataObject) -> None:
    # Given a prompt that ends in an ordinary letter
    prompt = tokenizer.encode("e")
    assert continues_text(prompt, tokenizer)
    ids = data.draw(ids_of(tokenizer))
    # When its answer is decoded as a continuation
    detokenizer = Detokenizer(tokenizer, continues=True)
    text = detokenizer.extend(ids) + detokenizer.flush()
    # Then prompt and answer make up the text of both
    assert tokenizer.decode(prompt) + text == tokenizer.decode(prompt + ids)


def test_a_prompt_that_ends_in_a_special_token_starts_a_new_text(llama: Tokenizer) -> None:
    assert not continues_text([], llama)
    assert not continues_text([llama.token_id("</s>") or 0], llama)
    assert not continues_text([llama.vocab_size + 5], llama)


def test_a_character_split_over_tokens_comes_out_once_complete(byte_level: Tokenizer) -> None:
    detokenizer = Detokenizer(byte_level)
    single = [byte_level.token_id(char) for char in "ðŁĺĢ"]  # the four bytes of 😀
    assert [detokenizer.push(token or 0) for token in single] == ["", "", "", "😀"]
    assert detokenizer.flush() == ""


def test_an_incomplete_character_is_flushed_as_one_replacement(byte_level: Tokenizer) -> None:
    detokenizer = Detokenizer(byte_level)
    assert detokenizer.extend([byte_level.token_id(char) or 0 for char in "ðŁĺ"]) == ""
    assert detokenizer.flush() == "\ufffd"


def test_a_run_of_byte_tokens_stays_pending_until_another_token_ends_it(llama: Tokenizer) -> None:
    detokenizer = Detokenizer(llama)
    run = [llama.token_id(f"<0x{byte:02X}>") or 0 for byte in "é\n".encode()]
    assert detokenizer.extend(run) == ""
    assert detokenizer.pending == "é\n"
    assert detokenizer.push(llama.token_id("▁the") or 0) == "é\n the"


def test_the_start_of_a_text_loses_one_space_also_when_it_comes_as_bytes(llama: Tokenizer) -> None:
    detokenizer = Detokenizer(llama)
    run = [llama.token_id(f"<0x{byte:02X}>") or 0 for byte in b"  A"]
    assert [(detokenizer.push(token), detokenizer.pending) for token in run] == [("", ""), ("", " "), ("", " A")]
    assert detokenizer.flush() == " A"


def test_a_run_broken_beyond_repair_comes_out_at_once(llama: Tokenizer) -> None:
    detokenizer = Detokenizer(llama)
    run = [llama.token_id(f"<0x{byte:02X}>") or 0 for byte in (0x41, 0xFF)]
    assert detokenizer.extend(run) == "\ufffd\ufffd"
    assert detokenizer.push(run[0]) == "\ufffd"  # the whole run is lost, valid bytes after the break too


@pytest.mark.parametrize(
    "decoder",
    [
        {"type": "WordPiece", "prefix": "##", "cleanup": True},
        {"type": "CTC"},
        {"type": "BPEDecoder", "suffix": "</w>"},
        {"type": "Strip", "content": " ", "start": 1, "stop": 0},
        {"type": "Sequence", "decoders": [{"type": "Fuse"}, {"type": "Strip", "content": " ", "start": 0, "stop": 1}]},
        {"type": "Sequence", "decoders": [{"type": "Fuse"}, {"type": "ByteFallback"}]},
        {"type": "Sequence", "decoders": [{"type": "ByteFallback"}, {"type": "ByteLevel"}]},
        {
            "type": "Sequence",
            "decoders": [{"type": "Fuse"}, {"type": "Replace", "pattern": {"String": "a"}, "content": "b"}],
        },
        {"type": "Replace", "pattern": {"Regex": "a+"}, "content": "b"},
    ],
    ids=lambda decoder: json.dumps(decoder)[:60],
)
def test_a_decoder_that_cannot_be_followed_is_refused_by_name(decoder: dict[str, Any]) -> None:
    with pytest.raises(ModelFilesError, match="cannot be followed token by token"):
        parse_decoder(decoder)


@pytest.mark.model
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_the_demo_models_text_equals_the_whole_decoding(demo_model: Path, data: st.DataObject) -> None:
    tokenizer = _demo(demo_model)
    ids = data.draw(ids_of(tokenizer))
    detokenizer = Detokenizer(tokenizer)
    assert detokenizer.extend(ids) + detokenizer.flush() == tokenizer.decode(ids)


_demo = cache(Tokenizer.load)
