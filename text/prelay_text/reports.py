"""What a client is told of single tokens: of an answer as it goes out, and of the prompt."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from prelay_queue.errors import BadMessageError
from prelay_queue.note import Note

from .pieces import Pieces, token_string
from .tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Likely:
    """A token and its natural log-probability at one position; None where nothing comes before it."""

    text: str
    logprob: float | None
    bytes: bytes


@dataclass(frozen=True, slots=True)
class TokenReport:
    """A token of the answer: the likeliest at its position beside it, and the character at which its text begins."""

    chosen: Likely
    top: tuple[Likely, ...]
    offset: int


class Reporter:
    """Reports on the tokens of one answer, in order and each once; only what is delivered may be pushed.

    A delivered token is never taken back, so there is nothing to rewind. `start` is how many characters of the whole
    text stand before the answer.
    """

    def __init__(
        self, tokenizer: Tokenizer, *, continues: bool = False, skip_special_tokens: bool = True, start: int = 0
    ) -> None:
        self._tokenizer = tokenizer
        self._pieces = Pieces(tokenizer, skip_special_tokens=skip_special_tokens, continues=continues)
        self._start = start

    def push(self, ids: Sequence[int], notes: Iterable[str]) -> tuple[TokenReport, ...]:
        """Report on the next ids with their notes. Raise BadMessageError when a note is none."""
        start, likely = len(self._pieces), []
        for token, raw in zip(ids, notes, strict=True):
            own = Note.decode(raw).logprobs
            if own is None:
                raise BadMessageError(raw.encode(), f"token {token} came without its log-probability")
            top = tuple(self._likely(*each) for each in own.top)
            likely.append((self._likely(token, own.logprob), top))
            self._pieces.push(token)
        offsets = self._pieces.offsets(start)
        return tuple(TokenReport(*found, self._start + offset) for found, offset in zip(likely, offsets, strict=True))

    def _likely(self, token: int, logprob: float) -> Likely:
        return Likely(token_string(self._tokenizer, token), logprob, self._pieces.bytes_of(token))


def prompt_report(tokenizer: Tokenizer, prompt_ids: Sequence[int], note: Note, most: int) -> list[Any]:
    """The field `prompt_logprobs` as vLLM has it: for each token null or an object by token id.

    The first token has null: nothing comes before it. The note may tell more of the likeliest than `most`.
    """
    found: list[Any] = [None]
    for token, logprobs in zip(prompt_ids[1:], note.prompt, strict=True):
        ranked = [(each, value, rank) for rank, (each, value) in enumerate(logprobs.top[:most], start=1)]
        if all(each != token for each, _, _ in ranked):
            ranked.append((token, logprobs.logprob, logprobs.rank))
        found.append(
            {
                str(each): {"logprob": value, "rank": rank, "decoded_token": token_string(tokenizer, each)}
                for each, value, rank in ranked
            }
        )
    return found
