"""A prompt as it is repeated before its answer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from prelay_queue.note import Note

from .pieces import Pieces, token_string
from .reports import Likely, TokenReport
from .tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Echo:
    """The text of a prompt, and the character of it at which each of its tokens begins."""

    ids: tuple[int, ...]
    text: str
    offsets: tuple[int, ...]

    def reports(self, tokenizer: Tokenizer, note: Note, most: int) -> tuple[TokenReport, ...]:
        """Report on each token of the prompt; on the first without a probability, for nothing comes before it.

        `note` is that of the answer's first token. Up to `most` of the likeliest are told.
        """
        reports = [TokenReport(_likely(tokenizer, self.ids[0], None), (), self.offsets[0])]
        for token, offset, found in zip(self.ids[1:], self.offsets[1:], note.prompt, strict=True):
            top = tuple(_likely(tokenizer, *each) for each in found.top[:most])
            reports.append(TokenReport(_likely(tokenizer, token, found.logprob), top, offset))
        return tuple(reports)


def _likely(tokenizer: Tokenizer, token: int, logprob: float | None) -> Likely:
    return Likely(token_string(tokenizer, token), logprob, tokenizer.token_bytes(token))


def echo_of(ids: Sequence[int], given: str | None, tokenizer: Tokenizer) -> Echo:
    """The prompt of these ids as text: as the model reads it, special tokens spelled out.

    `given` is the text that they came from, if one did: special tokens that the tokenizer put around it are not shown.
    """
    first, last = (0, len(ids)) if given is None else _own(ids, given, tokenizer)
    pieces = Pieces(tokenizer, skip_special_tokens=False)
    text = pieces.extend(ids[first:last]) + pieces.flush()
    offsets = [0] * first + pieces.offsets() + [len(text)] * (len(ids) - last)
    return Echo(tuple(ids), text, tuple(offsets))


def _own(ids: Sequence[int], given: str, tokenizer: Tokenizer) -> tuple[int, int]:
    """Which ids are of the text itself: those between the special tokens that it does not spell out at its ends."""

    def added(token: int, spelled: Callable[[str], bool]) -> bool:
        return token in tokenizer.special_ids and not spelled(tokenizer.token(token) or "")

    first, last = 0, len(ids)
    while first < last and added(ids[first], given.startswith):
        first += 1
    while last > first and added(ids[last - 1], given.endswith):
        last -= 1
    return first, last
