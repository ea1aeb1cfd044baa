"""A chat is tokenised in segments where that gives the very same ids, and as one text everywhere else."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, models, normalizers, pre_tokenizers, processors

from prelay_text.segments import CAPACITY, Segments, marks_of
from prelay_text.template import ChatTemplate
from prelay_text.tokenizer import Tokenizer
from tests.unit.text.families import BACKENDS, SPECIALS

TEMPLATE = "{% for message in messages %}<s>{{ message.role }}\n{{ message.content }}<|end|>\n{% endfor %}"

Change = Callable[[tokenizers.Tokenizer], None]


def _pre_tokenizer(part: Any) -> Change:
    return lambda backend: setattr(backend, "pre_tokenizer", part)


def _normalizer(part: Any) -> Change:
    return lambda backend: setattr(backend, "normalizer", part)


def _added(*tokens: AddedToken) -> Change:
    def change(backend: tokenizers.Tokenizer) -> None:
        backend.add_tokens([token for token in tokens if not token.special])
        backend.add_special_tokens([token for token in tokens if token.special])

    return change


def _start_token(backend: tokenizers.Tokenizer) -> None:
    start = ("<s>", backend.token_to_id("<s>"))
    backend.post_processor = processors.TemplateProcessing(single="<s> $A </s>", special_tokens=[start, ("</s>", 2)])


def _special(content: str, **flags: bool) -> AddedToken:
    return AddedToken(content, special=True, normalized=False, **flags)


#: What tokenizers do to a text before their model, one by one and together with each family.
CHANGES: dict[str, Change] = {
    "as it is": lambda _: None,
    "metaspace at the beginning": _pre_tokenizer(pre_tokenizers.Metaspace(prepend_scheme="first", split=False)),
    "metaspace always": _pre_tokenizer(pre_tokenizers.Metaspace(prepend_scheme="always")),
    "metaspace never": _pre_tokenizer(pre_tokenizers.Metaspace(prepend_scheme="never")),
    "a space before each piece": _pre_tokenizer(pre_tokenizers.ByteLevel(add_prefix_space=True)),
    "digits, and bytes": _pre_tokenizer(
        pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(False)])
    ),
    "scripts": _pre_tokenizer(pre_tokenizers.Sequence([pre_tokenizers.Whitespace(), pre_tokenizers.UnicodeScripts()])),
    "lower case": _normalizer(normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])),
    "stripped": _normalizer(normalizers.Strip()),
    "a letter first": _normalizer(normalizers.Prepend("▁")),
    "a start and an end": _start_token,
    "a longer mark": _added(_special("<s>user"), _special("<|end|>\n\n")),
    "words": _added(AddedToken("dog", normalized=True), AddedToken("\n\n", normalized=False), AddedToken("the")),
    "a token that takes blanks behind it": _added(_special("<|user|>", rstrip=True), _special("<s>", rstrip=True)),
}

PIECES = (
    *SPECIALS, "<s>user", "<|end", "|>", "<", "</s", "s>", "<|user|>", "the", " the dog", "Dog", "q", "Ġq", "▁", "日本",
    "1234", "é", "e\u0301", "😀", "\u00a0", "\t", "\n", "\n\n", " ", "  ",
)  # fmt: skip
TEXTS = st.lists(st.sampled_from(PIECES) | st.text(max_size=4), max_size=16).map("".join)


def _built(family: str, change: Change) -> tokenizers.Tokenizer:
    backend = BACKENDS[family]()
    change(backend)
    return backend


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
@pytest.mark.parametrize("family", sorted(BACKENDS))
def test_segments_have_the_ids_of_the_whole_text(family: str, change: Change) -> None:
    tokenizer = Tokenizer(_built(family, change), context_len=64, template=ChatTemplate(TEMPLATE))
    assert tokenizer._segments is not None, "these tokenizers are all cut"
    encode = tokenizer.encode

    @settings(max_examples=25, deadline=None)
    @given(TEXTS)
    def check(text: str) -> None:
        assert tokenizer.encode_chat(text) == encode(text)  # perhaps known in part
        assert tokenizer.encode_chat(text) == encode(text)  # known in whole

    check()


def _overlapping(content: str) -> Change:
    return _added(_special(content))


def _unsplit(backend: tokenizers.Tokenizer) -> None:
    backend.encode_special_tokens = True


def _twice(backend: tokenizers.Tokenizer) -> None:
    backend.post_processor = processors.TemplateProcessing(single="$A $A", special_tokens=[])


class _Custom:
    def normalize(self, text: Any) -> None:
        text.append(str(len(text.normalized)))


REFUSED: dict[str, Change] = {
    "a token takes blanks before it": _added(_special("<|mask|>", lstrip=True)),
    "a token must be a whole word": _added(AddedToken("dog", single_word=True, normalized=False)),
    "special tokens are text": _unsplit,
    "the text comes twice": _twice,
    "a normalizer in Python": lambda backend: setattr(backend, "normalizer", normalizers.Normalizer.custom(_Custom())),
}


@pytest.mark.parametrize("change", REFUSED.values(), ids=REFUSED.keys())
def test_a_text_is_not_cut_where_its_pieces_may_not_stand_alone(change: Change) -> None:
    backend = _built("byte_level", change)
    assert marks_of(backend, TEMPLATE) == ()


def test_a_text_is_not_cut_where_a_model_draws_lots() -> None:
    backend = tokenizers.Tokenizer(models.BPE({"a": 0, "b": 1, "ab": 2}, [("a", "b")], dropout=0.5))
    backend.add_special_tokens(["<s>"])
    assert marks_of(backend, TEMPLATE) == ()
    backend.model.dropout = None
    assert marks_of(backend, TEMPLATE) == ("<s>",)


@pytest.mark.parametrize("other", ["x<s>", "a<", "<<s", "</s><s>y"])
def test_a_text_is_not_cut_inside_of_another_token(other: str) -> None:
    """`<s>` may stand in such a token, or begin in it: then it is no match."""
    backend = _built("byte_level", _overlapping(other))
    assert "<s>" not in marks_of(backend, TEMPLATE)
    assert "<|end|>" in marks_of(backend, TEMPLATE) or other == "a<"


def test_only_the_templates_own_tokens_are_looked_for() -> None:
    backend = BACKENDS["byte_level"]()
    assert marks_of(backend, TEMPLATE) == ("<s>", "<|end|>")
    assert marks_of(backend, "{{ messages }}") == ()
    assert ChatTemplate("{{ bos_token }}", {"bos_token": "<s>"}).written.count("<s>") == 1


def test_a_turn_that_was_seen_is_not_tokenised_again() -> None:
    asked: list[str] = []

    def encode(text: str) -> list[int]:
        asked.append(text)
        return [len(text)]

    segments = Segments(("<s>",), encode)
    assert segments.ids("one<s>two<s>three") == [3, 6, 8]
    assert segments.ids("one<s>two<s>three<s>four") == [3, 6, 8, 7]
    assert asked == ["one", "<s>two", "<s>three", "<s>four"]
    assert segments.ids("") == [0]


def test_what_is_remembered_is_bounded_and_the_oldest_goes_first() -> None:
    asked: list[str] = []

    def encode(text: str) -> list[int]:
        asked.append(text)
        return [1] * len(text)

    segments = Segments(("<s>",), encode, capacity=8000)
    for turn in range(100):
        segments.ids(f"<s>kept{turn - turn % 3}<s>{turn:0100}")
        assert segments.size <= 8000
    before = len(asked)
    segments.ids(f"<s>{99:0100}")
    assert len(asked) == before
    segments.ids(f"<s>{0:0100}")
    assert len(asked) == before + 1
    segments.ids("<s>" + "x" * 8000)  # larger than its share: not remembered, and nothing is forgotten for it
    segments.ids(f"<s>{99:0100}")
    assert len(asked) == before + 2


def test_threads_may_share_segments(byte_level: Tokenizer) -> None:
    segments = Segments(("<s>",), byte_level.encode, capacity=4000)
    texts = [f"<s>the dog {number % 7}<s>日本 {number}" for number in range(200)]
    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(segments.ids, texts)) == list(map(byte_level.encode, texts))
    assert 0 < segments.size <= 4000


@pytest.mark.model
def test_the_demo_models_chats_are_cut(demo_model: Path) -> None:
    tokenizer = Tokenizer.load(demo_model)
    assert tokenizer._segments is not None
    messages = [{"role": role, "content": f"{role} <|im_end|> 1 2\n\n"} for role in ("system", "user", "assistant")]
    text = tokenizer.template.render(messages)
    assert tokenizer.encode_chat(text) == tokenizer.encode(text)
    assert 0 < tokenizer._segments.size < CAPACITY
