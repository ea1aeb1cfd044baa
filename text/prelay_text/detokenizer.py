"""Ids to text, one token at a time, ending at the text that decoding the whole gives.

Text comes out when no later token can change it:

- byte-level: as soon as a character is complete. A broken sequence gives one U+FFFD per maximal
  ill-formed part, as the whole decoding does.
- byte fallback: a run of byte tokens is decoded as one. It stays open until another token ends it,
  because a broken byte at its end turns the whole run into U+FFFD; once it is broken beyond repair,
  each of its bytes comes out as U+FFFD at once.

`pending` is the part of an open run that would stand if the text ended here.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence

from .decoding import Piece
from .tokenizer import Tokenizer

_utf8_decoder = codecs.getincrementaldecoder("utf-8")
_REPLACEMENT = "\ufffd"


class Detokenizer:
    """Text of a growing list of ids; its whole state follows from the ids, so a rewind is a new one.

    `continues`: the text goes on from a prompt, so a leading space is part of it. Otherwise the
    decoder's rule for the start of a text applies (Llama-like tokenizers drop one space there).
    Ids that the vocabulary does not know give no text.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        skip_special_tokens: bool = True,
        continues: bool = False,
    ) -> None:
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_ids if skip_special_tokens else frozenset()
        decoding = tokenizer.decoding
        self._bytes = _utf8_decoder("replace") if decoding.byte_level else None
        self._run = _ByteRun()
        self._decoding = decoding
        self._at_start = not continues
        self._first = not continues
        self._strip_left = 0 if continues else decoding.strip_count

    def push(self, token: int) -> str:
        """The text that is settled by this token: often its own, sometimes none, sometimes more."""
        piece = self.piece(token)
        if piece is None:
            return ""
        self._at_start = False
        if isinstance(piece, int):
            settled = self._run.push(piece)
            return self._out(settled) if settled else ""
        if isinstance(piece, bytes):
            text = self._bytes.decode(piece) if self._bytes else ""
            return self._stripped(text) if self._strip_left else text
        if self._run:
            return self._out(self._run.close()) + self._out(piece)
        return self._out(piece)

    def piece(self, token: int) -> Piece | None:
        """What the token would give if it came next; None for one that gives no text (skipped, or unknown)."""
        return None if token in self._skipped else self._tokenizer.piece(token, self._at_start)

    def extend(self, tokens: Iterable[int]) -> str:
        return "".join(map(self.push, tokens))

    @property
    def pending(self) -> str:
        """What is not settled but would stand if the text ended here; none while a character is incomplete."""
        if not self._run.text or self._run.incomplete:
            return ""
        text = self._decoding.settle(self._run.text, self._first)
        return text[leading(text, self._decoding.strip, self._strip_left) :] if self._strip_left else text

    def flush(self) -> str:
        """The rest, now that no token follows: what was pending, U+FFFD for what is incomplete."""
        if self._bytes:
            text = self._bytes.decode(b"", final=True)
            return self._stripped(text) if self._strip_left else text
        return self._out(self._run.close()) if self._run else ""

    def _out(self, text: str) -> str:
        text = self._decoding.settle(text, self._first)
        self._first = False
        return self._stripped(text) if self._strip_left else text

    def _stripped(self, text: str) -> str:
        count = leading(text, self._decoding.strip, self._strip_left)
        # The first other character ends the start of the text, and with it the stripping.
        self._strip_left = self._strip_left - count if count == len(text) else 0
        return text[count:]


def continues_text(prompt_ids: Sequence[int], tokenizer: Tokenizer) -> bool:
    """Whether an answer goes on from text: the prompt's last token is known and not special.

    Whoever watches a job (worker, relay) derives `continues` from it, so that all see one text.
    """
    last = prompt_ids[-1] if prompt_ids else None
    return last is not None and last not in tokenizer.special_ids and tokenizer.token(last) is not None


class _ByteRun:
    """An open run of byte-fallback tokens. `text` is its complete characters so far, `count` its bytes held back."""

    def __init__(self) -> None:
        self._clear()

    def _clear(self) -> None:
        self._decoder = _utf8_decoder("strict")
        self.count = 0
        self.broken = False
        self.text = ""

    def __bool__(self) -> bool:
        return self.count > 0 or self.broken

    @property
    def incomplete(self) -> bool:
        """Whether the run ends inside a character."""
        return bool(self._decoder.getstate()[0])

    def push(self, byte: int) -> str:
        """What the byte settles: nothing while the run may still be valid."""
        if self.broken:
            return _REPLACEMENT
        self.count += 1
        try:
            self.text += self._decoder.decode(bytes([byte]))
        except UnicodeDecodeError:
            self.broken, lost = True, self.count
            self.count, self.text = 0, ""
            return _REPLACEMENT * lost
        return ""

    def close(self) -> str:
        """Another token or the end follows: the run's text, U+FFFD per byte when it is incomplete."""
        try:
            self._decoder.decode(b"", final=True)
            text = self.text
        except UnicodeDecodeError:
            text = _REPLACEMENT * self.count
        self._clear()
        return text


def leading(text: str, char: str, limit: int) -> int:
    """How many of the first `limit` characters are `char` without a break."""
    count = 0
    while count < min(limit, len(text)) and text[count] == char:
        count += 1
    return count
