"""Ids of one choice to the text deltas that a client sees.

Everything here follows from the ids. After a preemption the relay forgets what was not delivered
(`rewind`), and the next attempt's ids continue the very same text; a client that reconnects at a
cursor gets a new assembler that was pushed the ids up to it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from prelay_queue.job import FinishReason

from .errors import RewindError
from .stops import StopMatch, StopMatcher
from .tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Delta:
    """Text to hand out. `delivered` is the cursor after it: the first ids that it and all before rest on."""

    text: str
    delivered: int
    finish: FinishReason | None = None


class Assembler:
    """Turns the ids of one choice into deltas, whatever the ids and however they are split.

    `ids` are all ids taken in. `delivered` counts the leading ones that the text handed out rests on:
    with these ids given, no other continuation would have withheld any of that text. A token whose text
    is held back (half a character, the beginning of a stop string) is not among them, unless its
    arrival is what let earlier text out.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stops: Sequence[str] = (),
        *,
        stop_token_ids: Collection[int] = (),
        min_tokens: int = 0,
        continues: bool = False,
        skip_special_tokens: bool = True,
    ) -> None:
        self._tokenizer = tokenizer
        self._stops = tuple(stops)
        self._stop_token_ids = frozenset(stop_token_ids)
        self._min_tokens = min_tokens
        self._continues = continues
        self._skip_special_tokens = skip_special_tokens
        self._sent = 0  # characters handed out
        self.delivered = 0
        self.finished: FinishReason | None = None
        self._restart()

    def _restart(self) -> None:
        self.ids: list[int] = []
        self._held = ""  # text that came in after the last delta
        self._safe_ids = 0  # how many ids the text that is safe to hand out rests on
        self._matcher = StopMatcher(
            self._stops,
            self._tokenizer,
            stop_token_ids=self._stop_token_ids,
            min_tokens=self._min_tokens,
            continues=self._continues,
            skip_special_tokens=self._skip_special_tokens,
        )

    @property
    def match(self) -> StopMatch | None:
        """The stop string or stop id that ended the text, once it was seen."""
        return self._matcher.match

    def push(self, ids: Iterable[int]) -> Delta | None:
        """Take the next ids; None when they let no text out. Ids after a match change nothing."""
        if self.finished is not None:
            raise RewindError("the answer has ended: no ids may follow")
        self._held += "".join(map(self._take, ids))
        text = self._let_out(self._matcher.safe)
        if not text:
            return None
        self.delivered = self._safe_ids
        return Delta(text, self.delivered)

    def finish(self, reason: FinishReason) -> Delta:
        """End the answer: all text that was held back comes out, but for a stop string and what follows it.

        After it every id counts as delivered.
        """
        if self.finished is None:
            self._matcher.finish()
            self._held += self._matcher.text
            self.finished = reason
        text = self._let_out(self._matcher.length)
        self.delivered = len(self.ids)
        return Delta(text, self.delivered, self.finished)

    def rewind(self, count: int) -> None:
        """Forget the ids from `count` on, as if they had never come. O(count): it replays the rest.

        Raise RewindError, changing nothing, when some of them are delivered or `count` is too large.
        """
        if self.finished is not None or not self.delivered <= count <= len(self.ids):
            state = "ended" if self.finished is not None else f"{self.delivered} delivered of {len(self.ids)}"
            raise RewindError(f"cannot rewind to {count} ids: {state}")
        kept = self.ids[:count]
        self._restart()
        self._held = "".join(map(self._take, kept))[self._sent :]

    def _take(self, token: int) -> str:
        before = self._matcher.safe
        self.ids.append(token)
        self._matcher.push(token)
        if self._matcher.safe > before:
            self._safe_ids = len(self.ids)
        return self._matcher.text

    def _let_out(self, until: int) -> str:
        """Hand out the text up to character `until` of the whole."""
        text, self._held = self._held[: until - self._sent], self._held[until - self._sent :]
        self._sent += len(text)
        return text

    def __repr__(self) -> str:
        end = f", finished={self.finished}" if self.finished else ""
        return f"Assembler(ids={len(self.ids)}, delivered={self.delivered}, held={len(self._held)}{end})"
