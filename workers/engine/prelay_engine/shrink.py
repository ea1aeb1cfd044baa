"""What is done about a step that ran out of memory, and how small the next ones are to be. Pure.

The memory is that of what a step computes in between, which grows with its rows. So each failed step makes the next
one smaller, and one of a single row ends that row: there is no endless trying.

1. *It had more than a block of prompt tokens*: the next ones have half as many.
2. *Several rows ran*: the least urgent one is evicted, and restarts where there is memory; no more rows than the others
   run, so that its place is not taken at once. Reserved rows are never evicted: if there are only those, half of them
   run, and the rest wait.
3. *One row ran*: it ends.

Both limits double after RECOVERS_AFTER steps that had enough.
"""

from __future__ import annotations

from collections.abc import Sequence as Rows
from dataclasses import dataclass, replace

from .scheduler import Limits, Plan, Row, precedence

#: Steps with enough memory, one after the other, after which larger ones are tried: each try may cost somebody a place.
RECOVERS_AFTER = 200
#: What stands in place of the token of a sequence that ends because there is no memory even for it alone.
NO_MEMORY = -2


@dataclass(frozen=True, slots=True)
class Remedy:
    """Who goes, if anyone: at most one of the two is set."""

    evicted: str | None = None  # to be tried again
    ended: str | None = None  # for good

    def __str__(self) -> str:
        if self.evicted is not None:
            return f"{self.evicted} is evicted"
        return "the next is smaller" if self.ended is None else f"{self.ended} ends, there is not enough for it alone"


class Shrink:
    """The limits of an engine's steps that memory sets."""

    def __init__(self, tokens: int, rows: int, block_size: int) -> None:
        """`tokens` of prompts and `rows` a step has at most where memory is no limit."""
        self._most_tokens, self._most_rows, self._block_size = tokens, rows, block_size
        self._tokens, self._rows = tokens, rows
        self._good = 0  # steps since the last that failed, or since the limits were raised

    def __repr__(self) -> str:
        return f"Shrink(tokens={self._tokens}/{self._most_tokens}, rows={self._rows}/{self._most_rows})"

    def limits(self, limits: Limits) -> Limits:
        """The same, and no more than memory allows. Half of a smaller step is left to who is urgent."""
        if self._tokens < limits.tokens:
            limits = replace(limits, tokens=self._tokens, kept_tokens=min(limits.kept_tokens, self._tokens // 2))
        return limits if self._rows >= self._most_rows else replace(limits, rows=self._rows)

    def ran(self) -> None:
        """A step had enough memory."""
        self._good += 1
        if self._good >= RECOVERS_AFTER:
            self._good = 0
            self._tokens = min(self._most_tokens, 2 * self._tokens)
            self._rows = min(self._most_rows, 2 * self._rows)

    def failed(self, rows: Rows[Row], plan: Plan) -> Remedy:
        """The step of `plan`, over some of these rows, ran out of memory."""
        self._good = 0
        tokens = sum(chunk.tokens for chunk in plan.chunks)
        if tokens > self._block_size:  # 1
            self._tokens = max(self._block_size, tokens // 2)
            return Remedy()
        keys = {*plan.decode, *(chunk.key for chunk in plan.chunks)}
        ran = sorted((row for row in rows if row.key in keys), key=precedence)
        if len(ran) == 1:  # 3
            return Remedy(ended=ran[0].key)
        victim = next((row for row in reversed(ran) if not row.reserved), None)  # 2
        if victim is None:
            self._rows = len(ran) // 2
            return Remedy()
        self._rows = len(ran) - 1
        return Remedy(evicted=victim.key)
