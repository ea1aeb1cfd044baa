"""Offsets, bytes and printable strings of single tokens, against a slow model that owns each character."""

from __future__ import annotations

from functools import cache
from itertools import chain, groupby

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders

from prelay_queue.job import FinishReason
from prelay_text.assembler import Assembler
from prelay_text.decoding import Piece
from prelay_text.detokenizer import Detokenizer
from prelay_text.pieces import Pieces, token_string
from prelay_text.tokenizer import Tokenizer
from tests.unit.text.families import BACKENDS, build

TEXTS = ["the dog", "日本語 で", "😀 emoji 👩‍👩‍👧", "naïve  café\n\n", "  two", "", "Ωβ\t", "日本 z q", "<|end|>x"]
#: Bytes that make, continue and break characters, as each family spells them.
BYTES = [0x20, 0x41, 0x80, 0x97, 0xA5, 0xC3, 0xE6, 0xED, 0xF0, 0xF4, 0xFF]

#: A character of the text and the indices of the tokens that hold a byte of it.
Owned = tuple[str, frozenset[int]]


@cache
def ids_of(tokenizer: Tokenizer) -> st.SearchStrategy[list[int]]:
    """Random ids: any of the vocabulary and a few beyond it, real text and its ends, runs of telling bytes."""
    by_byte = {tokenizer.token_bytes(token): token for token in range(tokenizer.vocab_size - 1, 0, -1)}
    lone = [by_byte[bytes([byte])] for byte in BYTES if bytes([byte]) in by_byte] or [1]
    one = st.integers(0, tokenizer.vocab_size + 2).map(lambda token: [token])
    text = st.sampled_from(TEXTS).map(tokenizer.encode)
    cut = st.tuples(text, st.integers(0, 6)).map(lambda pair: pair[0][pair[1] :])
    run = st.lists(st.sampled_from([*lone, *tokenizer.eos_ids]), max_size=6)
    return st.lists(st.one_of(one, text, cut, run), max_size=10).map(lambda parts: list(chain(*parts)))


def pushed(tokenizer: Tokenizer, ids: list[int], **options: bool) -> Pieces:
    pieces = Pieces(tokenizer, **options)
    pieces.extend(ids)
    return pieces


def owned_characters(tokenizer: Tokenizer, ids: list[int], continues: bool = False) -> list[Owned]:
    """Each character of the text with the tokens it is made of, found the slow way."""
    live = [(n, token) for n, token in enumerate(ids) if token not in tokenizer.special_ids]
    live = [(n, token) for n, token in live if tokenizer.token(token) is not None]
    pieces = [(n, tokenizer.piece(token, not at and not continues)) for at, (n, token) in enumerate(live)]
    found: list[Owned] = []
    first = not continues
    for kind, group in groupby(pieces, lambda pair: type(pair[1])):
        if kind is str:
            for n, piece in group:
                text = tokenizer.decoding.settle(str(piece), first)
                found += [(char, frozenset({n})) for char in text]
                first = False
        else:
            made = [(n, byte) for n, piece in group for byte in _bytes_of(piece)]
            found += _of_bytes(made, whole=kind is int)
        first = False
    strip = 0 if continues else tokenizer.decoding.strip_count
    while strip and found and found[0][0] == tokenizer.decoding.strip:
        found, strip = found[1:], strip - 1
    return found


def _bytes_of(piece: Piece | None) -> bytes:
    assert isinstance(piece, bytes | int)
    return bytes([piece]) if isinstance(piece, int) else piece


def _of_bytes(made: list[tuple[int, int]], whole: bool) -> list[Owned]:
    """`whole`: one broken byte makes each byte a character of its own."""
    raw = bytes(byte for _, byte in made)
    if whole and "\ufffd" in raw.decode("utf-8", "replace"):
        return [("\ufffd", frozenset({n})) for n, _ in made]
    # The character that holds a byte is the last one of the text up to it.
    places = [len(raw[: end + 1].decode("utf-8", "replace")) - 1 for end in range(len(raw))]
    owners = [
        frozenset(n for (n, _), at in zip(made, places, strict=True) if at == place) for place in dict.fromkeys(places)
    ]
    return list(zip(raw.decode("utf-8", "replace"), owners, strict=True))


@settings(max_examples=80, deadline=None)
@given(data=st.data(), continues=st.booleans())
def test_each_offset_is_that_of_the_first_character_with_a_byte_of_the_token(
    tokenizer: Tokenizer, data: st.DataObject, continues: bool
) -> None:
    # Given a model that agrees with the library about the text
    ids = data.draw(ids_of(tokenizer))
    owned = owned_characters(tokenizer, ids, continues)
    if not continues:
        assert "".join(char for char, _ in owned) == tokenizer.decode(ids)
    # When the ids are pushed
    pieces = pushed(tokenizer, ids, continues=continues)
    offsets = pieces.offsets()
    # Then every token that owns characters stands at its first, and the others between their neighbours
    first = {n: at for at, (_, owners) in reversed([*enumerate(owned)]) for n in owners}
    assert {n: offsets[n] for n in first} == first
    assert offsets == sorted(offsets)
    assert all(0 <= offset <= len(owned) for offset in offsets)
    assert len(offsets) == len(pieces) == len(ids)
    pieces.flush()
    assert pieces.offsets() == offsets


@settings(max_examples=60, deadline=None)
@given(data=st.data(), continues=st.booleans(), skip=st.booleans())
def test_the_text_from_an_offset_on_starts_with_the_tokens_own_text(
    tokenizer: Tokenizer, data: st.DataObject, continues: bool, skip: bool
) -> None:
    ids = data.draw(ids_of(tokenizer))
    pieces, own = Pieces(tokenizer, continues=continues, skip_special_tokens=skip), []
    text = ""
    for token in ids:
        own.append(pieces.bytes_of(token))
        text += pieces.push(token)
    text += pieces.flush()
    for raw, offset in zip(own, pieces.offsets(), strict=True):
        whole = raw.decode("utf-8", "ignore").encode() == raw
        lost = text[offset : offset + 1] == "\ufffd"  # a byte of a broken run
        assert not whole or lost or text.startswith(raw.decode(), offset)


@settings(max_examples=80, deadline=None)
@given(data=st.data(), continues=st.booleans())
def test_the_bytes_of_the_tokens_are_those_of_the_text_but_for_broken_ones(
    tokenizer: Tokenizer, data: st.DataObject, continues: bool
) -> None:
    ids = data.draw(ids_of(tokenizer))
    pieces, raw = Pieces(tokenizer, continues=continues), list[tuple[bytes, bool]]()
    text = ""
    for token in ids:
        in_run = isinstance(pieces.piece(token), int)
        if pieces.piece(token) is not None:
            raw.append((pieces.bytes_of(token), in_run))
        else:
            assert pieces.bytes_of(token) == b""
        text += pieces.push(token)
    text += pieces.flush()
    expected = ""
    for in_run, group in groupby(raw, lambda pair: pair[1]):
        parts = [part for part, _ in group]
        joined = b"".join(parts).decode("utf-8", "replace")
        expected += "\ufffd" * len(parts) if in_run and "\ufffd" in joined else joined
    if expected.count("\ufffd") == text.count("\ufffd"):
        assert text == expected
    else:  # the space that would have been dropped is in the broken run at the start
        assert tokenizer.decoding.strip_count
        assert not continues
        assert text.lstrip("\ufffd") == expected.lstrip("\ufffd")


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_a_settled_offset_stays_whatever_follows(tokenizer: Tokenizer, data: st.DataObject) -> None:
    ids, more = data.draw(ids_of(tokenizer)), data.draw(ids_of(tokenizer))
    before, after = pushed(tokenizer, ids), pushed(tokenizer, ids + more)
    settled = before.settled
    assert after.offsets(0, settled) == before.offsets(0, settled)
    assert after.settled >= settled


@settings(max_examples=60, deadline=None)
@given(data=st.data(), stop=st.sampled_from(["", "A", "日", " d", "\n"]))
def test_what_an_assembler_delivers_has_offsets_that_stand(
    tokenizer: Tokenizer, data: st.DataObject, stop: str
) -> None:
    # Given ids that arrive one by one, and offsets read at each delta for the ids that it delivers
    ids = data.draw(ids_of(tokenizer))
    assembler, pieces = Assembler(tokenizer, [stop] if stop else []), Pieces(tokenizer)
    read: list[int] = []
    text = ""
    for token in ids:
        if assembler.match is not None:
            break
        delta = assembler.push([token])
        pieces.push(token)
        if delta is not None:
            assert assembler.match is not None or delta.delivered <= pieces.settled
            read += pieces.offsets(len(read), delta.delivered)
            text += delta.text
    end = assembler.finish(FinishReason.STOP)
    read += pieces.offsets(len(read), end.delivered)
    text += end.text
    # Then they are those of the whole, and each token that begins before the cut stands in the text handed out
    assert read == pushed(tokenizer, assembler.ids).offsets()
    whole = Detokenizer(tokenizer)
    assert (whole.extend(assembler.ids) + whole.flush()).startswith(text)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_the_pushes_give_the_text_that_a_detokenizer_gives(tokenizer: Tokenizer, data: st.DataObject) -> None:
    ids = data.draw(ids_of(tokenizer))
    plain, pieces = Detokenizer(tokenizer), Pieces(tokenizer)
    assert [pieces.push(token) for token in ids] == [plain.push(token) for token in ids]
    assert pieces.flush() == plain.flush()


def test_the_parts_of_a_character_share_its_place(byte_level: Tokenizer) -> None:
    smile = [byte_level.token_id(char) or 0 for char in "ðŁĺĢ"]
    assert pushed(byte_level, [*smile, *smile]).offsets() == [0, 0, 0, 0, 1, 1, 1, 1]


def test_a_token_after_half_a_character_stands_behind_its_replacement(byte_level: Tokenizer) -> None:
    half, dog = byte_level.token_id("æ") or 0, byte_level.encode("dog")
    end = byte_level.token_id("<|end|>") or 0
    pieces = pushed(byte_level, [half, end, dog[0], half, half])
    dog_length = len(byte_level.decode(dog[:1]))
    assert pieces.offsets() == [0, 0, 1, 1 + dog_length, 2 + dog_length]
    assert pieces.settled == 5


def test_bytes_that_python_still_waits_with_have_places_of_their_own(byte_level: Tokenizer) -> None:
    surrogate = [byte_level.token_id(char) or 0 for char in "íł"]  # ED A0 can begin no character
    end = byte_level.token_id("<|end|>") or 0
    assert pushed(byte_level, [*surrogate, end, *byte_level.encode("d")]).offsets() == [0, 1, 1, 2]


def test_the_places_in_a_run_of_bytes_change_when_it_breaks(llama: Tokenizer) -> None:
    a, c3, a9, ff = (llama.token_id(f"<0x{byte:02X}>") or 0 for byte in (0x41, 0xC3, 0xA9, 0xFF))
    pieces = pushed(llama, [a, c3, a9])
    assert (pieces.settled, pieces.offsets()) == (0, [0, 1, 1])
    pieces.push(c3)  # the run would end inside a character
    assert pieces.offsets() == [0, 1, 2, 3]
    pieces.push(ff)
    assert (pieces.settled, pieces.offsets(), pieces.offsets(3)) == (5, [0, 1, 2, 3, 4], [3, 4])


def test_a_run_of_bytes_is_settled_by_the_token_after_it(llama: Tokenizer) -> None:
    c3, a9 = (llama.token_id(f"<0x{byte:02X}>") or 0 for byte in (0xC3, 0xA9))
    the, end = llama.token_id("▁the") or 0, llama.token_id("<|end|>") or 0
    pieces = pushed(llama, [the, c3, end, a9, end])
    assert pieces.settled == 1
    pieces.push(the)
    assert pieces.offsets() == [0, 3, 3, 3, 4, 4]


def test_the_space_that_a_text_loses_at_its_start_has_no_bytes(llama: Tokenizer) -> None:
    the, space = llama.token_id("▁the") or 0, llama.token_id("<0x20>") or 0
    assert Pieces(llama).bytes_of(the) == b"the"
    assert Pieces(llama, continues=True).bytes_of(the) == b" the"
    assert [pushed(llama, before).bytes_of(the) for before in ([the], [space])] == [b" the", b" the"]
    assert [pushed(llama, before).bytes_of(space) for before in ([], [space])] == [b"", b" "]
    assert pushed(llama, [space, the]).offsets() == [0, 0]


def test_a_run_of_bytes_at_the_start_of_a_text_loses_its_space_too(llama: Tokenizer) -> None:
    space, a, e6 = (llama.token_id(f"<0x{byte:02X}>") or 0 for byte in (0x20, 0x41, 0xE6))
    the = llama.token_id("▁the") or 0
    assert pushed(llama, [space, a, a]).offsets() == [0, 0, 1]
    assert pushed(llama, [e6]).bytes_of(the) == b" the"  # it stands after a U+FFFD
    assert pushed(llama, [e6, the, the]).offsets() == [0, 1, 5]


def test_a_mark_spelled_in_bytes_takes_the_place_of_the_space_it_becomes() -> None:
    tokenizer = build("unigram")  # its decoder maps the mark after the bytes are joined, and drops it at the start
    mark = [tokenizer.token_id(f"<0x{byte:02X}>") or 0 for byte in "▁A".encode()]
    assert pushed(tokenizer, mark).offsets() == [0, 0, 0, 0]
    assert pushed(tokenizer, mark, continues=True).offsets() == [0, 0, 0, 1]


def test_a_byte_level_decoder_that_strips_leaves_the_space_out_of_the_bytes() -> None:
    backend = BACKENDS["byte_level"]()
    backend.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Strip(" ", 1, 0)])
    tokenizer = Tokenizer(backend, context_len=64)
    space, half, letter = (tokenizer.token_id(char) or 0 for char in "Ġæd")
    assert pushed(tokenizer, [space, space, letter]).offsets() == [0, 0, 1]
    firsts = [pushed(tokenizer, before).bytes_of(space) for before in ([], [space], [half], [letter])]
    assert firsts == [b"", b" ", b" ", b" "]


def test_special_and_unknown_tokens_have_no_bytes_and_take_no_place(tokenizer: Tokenizer) -> None:
    dog = tokenizer.encode("dog")
    ids = [*tokenizer.eos_ids, *dog, tokenizer.vocab_size + 2, *tokenizer.eos_ids]
    pieces = pushed(tokenizer, ids)
    length = len(tokenizer.decode(dog))
    assert pieces.offsets()[:2] == [0, 0]
    assert pieces.offsets()[-2:] == [length, length]
    assert [pieces.bytes_of(token) for token in ids[-2:]] == [b"", b""]


def test_a_token_is_printable_by_itself(byte_level: Tokenizer, llama: Tokenizer) -> None:
    def shown(tokenizer: Tokenizer, spelling: str) -> str:
        return token_string(tokenizer, tokenizer.token_id(spelling) or 0)

    assert shown(byte_level, "Ġq") == " q"
    assert shown(byte_level, "æ") == "\\xe6"
    assert shown(byte_level, "<|end|>") == shown(llama, "<|end|>") == "<|end|>"
    assert shown(llama, "▁the") == " the"
    assert (shown(llama, "<0x41>"), shown(llama, "<0xE6>")) == ("A", "\\xe6")
    assert token_string(llama, 99_999) == "token_id:99999"


def test_every_token_of_a_vocabulary_has_a_string_of_whole_characters(tokenizer: Tokenizer) -> None:
    strings = [token_string(tokenizer, token) for token in range(tokenizer.vocab_size + 3)]
    assert all(string and "\ufffd" not in string for string in strings)
    assert len(set(strings)) > 0.5 * len(strings)  # fallback bytes share theirs with letters


@pytest.mark.parametrize("family", ["byte_level", "llama"])
def test_no_push_looks_at_earlier_tokens(family: str, request: pytest.FixtureRequest) -> None:
    """Each token's piece is asked for the same number of times, however many stand before it."""
    tokenizer: Tokenizer = request.getfixturevalue(family)
    asked: list[int] = []

    class Counting(Pieces):
        def piece(self, token: int) -> Piece | None:
            asked.append(token)
            return super().piece(token)

    ids = tokenizer.encode("the 日本語 dog, ") * 200
    pieces = Counting(tokenizer)
    pieces.extend(ids)
    assert asked == [token for token in ids for _ in range(2)]
    assert len(pieces.offsets()) == len(ids)
