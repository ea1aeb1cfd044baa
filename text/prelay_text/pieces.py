"""What each token of an answer is by itself: where its text stands, the bytes it adds, how to show it.

This is what `logprobs` tell about a token beside its probability: `text_offset` of completions, `token` and
`bytes` of chats.
"""

from __future__ import annotations

from itertools import accumulate

from .decoding import Piece
from .detokenizer import Detokenizer, leading
from .tokenizer import Tokenizer


def token_string(tokenizer: Tokenizer, token: int) -> str:
    """The token as a client can print it: its text in the middle of a text, a special token's spelling.

    Bytes that are no character by themselves stand as `\\xe6`; an id that the vocabulary does not know (a model
    may have more rows than its tokenizer has tokens) as `token_id:123`. Never empty for a token that has text, but
    not unique: the byte token of "A" and the letter look alike.
    """
    spelling = tokenizer.token(token)
    if spelling is None:
        return f"token_id:{token}"
    if token in tokenizer.special_ids:
        return spelling
    return tokenizer.token_bytes(token).decode("utf-8", "backslashreplace")


class Pieces(Detokenizer):
    """A detokenizer that remembers where the text of each token begins. After a rewind: a new one, of the ids kept.

    Each id has an **offset**, in characters of the answer's text (as it is before a stop string cuts it): the place
    of the first character that holds a byte of the token. So the halves of a character share its place, the offsets
    never fall, and the text from a token's offset on starts with the token's own text, where that is whole characters.
    A token without text, special or unknown, has the place where the next text begins or a begun character stands.

    The offset of a byte-fallback token can change as long as its run is open, like its text: one broken byte makes each
    byte of the run a character. `settled` counts the leading ids whose offsets stand; all ids that an assembler counts
    as delivered are among them, unless a stop string or the end of the answer closed the run, where `offsets` are final
    too.

    A push costs the same however long the text has grown.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True, continues: bool = False) -> None:
        super().__init__(tokenizer, skip_special_tokens=skip_special_tokens, continues=continues)
        self._offsets: list[int] = []
        self._waiting: list[tuple[int, int]] = []  # of ids in an open run: its bytes and whole characters before
        self._length = 0  # characters settled

    @property
    def settled(self) -> int:
        """How many leading ids have an offset that no later token changes."""
        return len(self._offsets)

    def __len__(self) -> int:
        """How many ids were pushed."""
        return len(self._offsets) + len(self._waiting)

    def offsets(self, start: int = 0, stop: int | None = None) -> list[int]:
        """The offsets of ids `start` to `stop` (all that follow by default), for a text that ends at the last id."""
        stop = len(self) if stop is None else stop
        found = self._offsets[start:stop]
        if stop > self.settled:
            found += self._of_run()[max(0, start - self.settled) : stop - self.settled]
        return found

    def bytes_of(self, token: int) -> bytes:
        """The bytes that the token would add to the text if it came next; none for a token without text.

        Those of an answer's tokens, one after the other, are the UTF-8 of its text, but for bytes that are no
        characters, which stand as U+FFFD in the text. A space that the decoder drops at the start of a text is left
        out.
        """
        piece = self.piece(token)
        if piece is None:
            return b""
        if isinstance(piece, str):
            first = self._first and not self._run.count
            added = self._decoding.settle(piece, first).encode()
        else:
            added = bytes([piece]) if isinstance(piece, int) else piece
        return self._without_start(added) if self._strip_left else added

    def push(self, token: int) -> str:
        piece = self.piece(token)
        if self._held_back(piece):
            self._waiting.append((self._run.count, len(self._run.text)))
            text = super().push(token)
            if text:  # the run is broken: each of its bytes is a character
                self._settle([self._length + count for count, _ in self._waiting])
        else:
            place = self._length + self._ahead(piece)
            text = super().push(token)
            self._offsets.append(place)
        self._length += len(text)
        return text

    def flush(self) -> str:
        self._settle(self._of_run())
        text = super().flush()
        self._length += len(text)
        return text

    def _held_back(self, piece: Piece | None) -> bool:
        """Whether its place waits for the end of a run: that of a byte, or of a token without text inside the run."""
        return (isinstance(piece, int) and not self._run.broken) or (piece is None and self._run.count > 0)

    def _ahead(self, piece: Piece | None) -> int:
        """How many characters stand between what is settled and the token's place: what it closes of earlier tokens."""
        if self._bytes:
            begun = self._bytes.getstate()[0]
            return _last(begun + piece[:1]) if begun and isinstance(piece, bytes) else _last(begun)
        if not self._waiting:
            return 0
        self._settle(self._of_run())
        return self._run.count if self._run.incomplete else len(self.pending)

    def _settle(self, offsets: list[int]) -> None:
        self._offsets += offsets
        self._waiting.clear()

    def _of_run(self) -> list[int]:
        """Offsets of the ids that wait, if the run ended here."""
        if not self._waiting:
            return []
        if self._run.incomplete:
            return [self._length + count for count, _ in self._waiting]
        if not (self._decoding.after or self._strip_left):
            return [self._length + chars for _, chars in self._waiting]
        # What the last steps make of each character; they map single characters, where they do anything.
        widths = (len(self._decoding.settle(char, self._first)) for char in self._run.text)
        places = list(accumulate(widths, initial=0))
        kept = len(self.pending)
        dropped = max(0, places[-1] - kept)  # at the start of the text
        return [self._length + min(kept, max(0, places[chars] - dropped)) for _, chars in self._waiting]

    def _without_start(self, added: bytes) -> bytes:
        """Leave out what the decoder strips at the start of a text."""
        mark = self._decoding.strip.encode()
        for _ in range(self._to_strip()):
            if not added.startswith(mark):
                break
            added = added[len(mark) :]
        return added

    def _to_strip(self) -> int:
        """How many characters may still be dropped from the start of the next token."""
        if self._run.incomplete or (self._bytes and self._bytes.getstate()[0]):
            return 0
        before = self._decoding.settle(self._run.text, self._first)
        count = leading(before, self._decoding.strip, self._strip_left)
        return self._strip_left - count if count == len(before) else 0


def _last(begun: bytes) -> int:
    """The place, from where begun bytes begin, of the character that holds the last of them.

    Bytes that can make one character are one; others come where Python still waits with what cannot (ED A0, half
    a surrogate pair), or with the byte that breaks a character off.
    """
    return max(0, len(begun.decode("utf-8", "replace")) - 1)
