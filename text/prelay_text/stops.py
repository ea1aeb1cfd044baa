"""Stop strings: which token completes one, where the text is cut, how much must be held back.

The answer is a function of the ids alone, so the worker that ends the job and every process that
renders it agree: **the job ends at the first token after which the text so far, without its
incomplete last character, contains a stop string; the text is cut before the earliest one in it.**
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import lru_cache

from .detokenizer import Detokenizer
from .tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class StopMatch:
    """`start`: characters of the whole text that stay. `stop`: what matched, None for a stop token id."""

    start: int
    stop: str | None


class StopScanner:
    """Looks for stop strings in a growing text, each character once (Knuth–Morris–Pratt).

    `length` counts the characters scanned so far; the last `held` of them may yet begin a stop string.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._tables = [_failures(stop) for stop in self._stops]
        self._states = [0] * len(self._stops)
        self._ahead, self._ahead_length = self._states, 0
        self.length = 0

    @property
    def held(self) -> int:
        return max(self._states, default=0)

    def scan(self, text: str) -> StopMatch | None:
        """Take settled text in; report the earliest stop string that it completes."""
        if not text:
            return None
        match = self._advance(self._states, text, self.length) if self._stops else None
        self.length += len(text)
        self._ahead, self._ahead_length = self._states, 0
        return match

    def peek(self, pending: str) -> StopMatch | None:
        """The same for text that is not settled yet and grows from call to call until the next scan."""
        if not self._stops:
            return None
        if self._ahead_length == 0:
            self._ahead = list(self._states)
        fresh = pending[self._ahead_length :]
        match = self._advance(self._ahead, fresh, self.length + self._ahead_length)
        self._ahead_length = len(pending)
        return match

    def _advance(self, states: list[int], text: str, offset: int) -> StopMatch | None:
        """Move every automaton over `text`, whose first character stands at `offset` of the whole."""
        best: StopMatch | None = None
        for index, (stop, table) in enumerate(zip(self._stops, self._tables, strict=True)):
            state = states[index]
            for position, char in enumerate(text, offset + 1):
                while state and stop[state] != char:
                    state = table[state - 1]
                if stop[state] == char:
                    state += 1
                if state == len(stop):
                    start = position - len(stop)
                    best = StopMatch(start, stop) if best is None or start < best.start else best
                    state = table[state - 1]
            states[index] = state
        return best


@lru_cache(maxsize=1024)
def _failures(stop: str) -> tuple[int, ...]:
    """For each prefix of `stop`: the length of its longest proper prefix that is also its suffix."""
    table = [0] * len(stop)
    length = 0
    for index in range(1, len(stop)):
        while length and stop[index] != stop[length]:
            length = table[length - 1]
        if stop[index] == stop[length]:
            length += 1
        table[index] = length
    return tuple(table)


class StopMatcher:
    """Watches the tokens of one answer for the end that its stop strings and stop ids ask for.

    A stop string that is the text of a special token ("<|im_end|>") matches that token, though the
    token gives no text; text that spells it out matches too. A longer string around a special token
    matches only as text, which special tokens are part of where they are not skipped.

    What the first `min_tokens` tokens complete does not count; what a later one completes does, wherever it begins.

    `text` is what the last push added to the text: settled, or up to and beyond the match it found.
    """

    def __init__(
        self,
        stops: Sequence[str],
        tokenizer: Tokenizer,
        *,
        stop_token_ids: Collection[int] = (),
        min_tokens: int = 0,
        continues: bool = False,
        skip_special_tokens: bool = True,
    ) -> None:
        self._deaf = min_tokens  # so many tokens from now on end nothing
        self._detokenizer = Detokenizer(tokenizer, skip_special_tokens=skip_special_tokens, continues=continues)
        self._scanner = StopScanner(stops)
        self._ends: dict[int, str | None] = dict.fromkeys(stop_token_ids)
        self._ends.update(_special_stops(stops, tokenizer))
        self.match: StopMatch | None = None
        self.text = ""

    @property
    def safe(self) -> int:
        """Characters of the whole text that no further token can take back."""
        if self.match is not None:
            return self.match.start
        return self._scanner.length - self._scanner.held

    @property
    def length(self) -> int:
        """Characters of the whole text so far, up to the match where there is one."""
        return self._scanner.length if self.match is None else self.match.start

    def push(self, token: int) -> StopMatch | None:
        """Take the next token; answer with the match it completes. After a match nothing changes any more."""
        if self.match is not None:
            self.text = ""
            return self.match
        deaf, self._deaf = self._deaf > 0, max(0, self._deaf - 1)
        if token in self._ends and not deaf:
            return self._end(self._ends[token])
        self.text = self._detokenizer.push(token)
        self.match = self._heard(self._scanner.scan(self.text), deaf)
        pending = self._detokenizer.pending
        if self.match is None and pending:
            self.match = self._heard(self._scanner.peek(pending), deaf)
            if self.match is not None:
                self.text += pending
        return self.match

    @staticmethod
    def _heard(match: StopMatch | None, deaf: bool) -> StopMatch | None:
        return None if deaf else match

    def finish(self) -> StopMatch | None:
        """No token follows: what was incomplete comes out. It can complete a stop string only if that holds U+FFFD."""
        self.text = ""
        if self.match is None:
            self.text = self._detokenizer.flush()
            self.match = self._scanner.scan(self.text)
        return self.match

    def _end(self, stop: str | None) -> StopMatch:
        self.finish()
        if self.match is None:
            self.match = StopMatch(self._scanner.length, stop)
        return self.match


def _special_stops(stops: Sequence[str], tokenizer: Tokenizer) -> dict[int, str]:
    ids = {stop: tokenizer.token_id(stop) for stop in stops}
    return {i: stop for stop, i in ids.items() if i is not None and i in tokenizer.special_ids}
