"""How much batch work a step may take, from what steps were seen to cost. Pure, but for the clock that it is given.

1. *Nothing urgent runs*: the batch has the step. The tokens of its prompts are as many as take about `target_ms`, so
   that who arrives meanwhile waits little. The engine can even abandon such a step for who arrives; after
   `MOST_ABANDONED` of them in a row one has few of those tokens and is not abandoned, so that the batch gets on
   whatever arrives. A decode worker abandons two for one job: to copy its KV, and to have it join.
2. *Urgent rows decode*: the batch may add `SHARE` to what the step takes without it, and has `LEAST_ROWS` in any case.
3. *An urgent prompt is computed*: the batch waits. If that lasts, it has the least of 1 and 2 every `LEAST_EVERY_S`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from collections.abc import Sequence as Rows
from dataclasses import dataclass

from .scheduler import BATCH, Limits, Plan, Row

#: By how much batch rows may lengthen a step in which urgent ones decode.
SHARE = 0.25
#: Tokens of a batch-only step, at least: below, most of a step is what any step costs.
LEAST_TOKENS = 32
#: Decoding batch rows beside urgent ones, at least: so few cost next to nothing.
LEAST_ROWS = 4
#: A batch that waits has a little of a step this often, seconds.
LEAST_EVERY_S = 1.0
#: Batch-only steps that may be abandoned in a row.
MOST_ABANDONED = 2
#: How much of what was learnt is left after each further step.
_MEMORY = 0.95


@dataclass(slots=True)
class Line:
    """Fits y = a + b x to what is told, the latest most; neither a nor b is below 0."""

    weight: float = 0.0
    x: float = 0.0  # weighted sums
    y: float = 0.0
    xx: float = 0.0
    xy: float = 0.0

    def add(self, x: float, y: float) -> None:
        self.weight = self.weight * _MEMORY + 1
        self.x = self.x * _MEMORY + x
        self.y = self.y * _MEMORY + y
        self.xx = self.xx * _MEMORY + x * x
        self.xy = self.xy * _MEMORY + x * y

    @property
    def slope(self) -> float:
        """What one x more costs. All of the mean where x has not differed yet: too much rather than too little."""
        if not self.x:
            return 0.0
        most = self.y / self.x
        spread = self.xx * self.weight - self.x * self.x
        if spread < self.weight * self.weight:  # a variance below 1
            return most
        return min(most, max(0.0, (self.xy * self.weight - self.x * self.y) / spread))

    def at(self, x: float) -> float:
        if not self.weight:
            return 0.0
        return self.y / self.weight + self.slope * (x - self.x / self.weight)


class Pace:
    """Says what the batch may have of each step, and learns from the steps."""

    def __init__(self, tokens: int, target_ms: float, clock: Callable[[], float] = time.monotonic) -> None:
        """`tokens`: of prompts in a step, at most; `target_ms`: what a step should take that has only batch work."""
        self._most = tokens
        self._least = min(LEAST_TOKENS, max(1, tokens // 2))  # half a step of it is left to who is urgent
        self._target_ms = target_ms
        self._clock = clock
        self._budget = float(self._least)
        self._token_ms = 0.0  # of a token of a prompt, with its share of all that a step costs; 0: not known yet
        self._decoding = Line()  # milliseconds by rows, of steps that only decode
        self._served = clock()  # when the batch last had a step, or nothing to do
        self._abandoned = 0  # steps in a row

    def __repr__(self) -> str:
        return f"Pace(budget={self._budget:.0f} tokens, row={self._decoding.slope:.2f} ms)"

    @property
    def may_abandon(self) -> bool:
        """Whether a step that has only batch work may be abandoned."""
        return self._abandoned < MOST_ABANDONED

    def limits(self, rows: Rows[Row]) -> Limits:
        """What the next step over these rows may take."""
        urgent = [row for row in rows if row.priority < BATCH]
        if len(urgent) == len(rows):
            self._served = self._clock()
            return Limits(self._most)
        if not urgent:
            return Limits(self._most, int(self._budget) if self.may_abandon else self._least)
        if any(row.todo for row in urgent):
            due = self._clock() - self._served >= LEAST_EVERY_S
            return Limits(self._most, self._least, LEAST_ROWS, self._least) if due else Limits(self._most, 0, 0)
        decoding = sum(row.priority >= BATCH and not row.todo for row in rows)
        return self._beside(len(urgent), decoding)

    def _beside(self, urgent: int, batch: int) -> Limits:
        """Beside so many decoding rows that are urgent; `batch` rows decode, too."""
        spare_ms, row_ms = SHARE * self._decoding.at(urgent), self._decoding.slope
        rows = batch if row_ms * batch <= spare_ms else max(LEAST_ROWS, int(spare_ms / row_ms))
        spare_ms = max(0.0, spare_ms - row_ms * min(rows, batch))
        tokens = int(spare_ms / self._token_ms) if self._token_ms else self._least
        return Limits(self._most, tokens if batch else max(1, tokens), rows)

    def ran(self, rows: Rows[Row], plan: Plan, took_ms: float) -> None:
        """A step over these rows has run."""
        batch = {row.key for row in rows if row.priority >= BATCH}
        keys = [*plan.decode, *(chunk.key for chunk in plan.chunks)]
        if batch.intersection(keys):
            self._served = self._clock()
        tokens = sum(chunk.tokens for chunk in plan.chunks)
        if not tokens:
            self._decoding.add(len(plan.decode), took_ms)
        elif tokens >= self._least:
            each = took_ms / tokens
            self._token_ms += 0.2 * (each - self._token_ms) if self._token_ms else each
        if batch.issuperset(keys):
            self._abandoned = 0
            if tokens >= int(self._budget):
                self._adapt(took_ms)

    def _adapt(self, took_ms: float) -> None:
        """A step was full of batch work and took so long."""
        wanted = self._budget * (self._target_ms / max(took_ms, 0.001)) ** 0.5
        self._budget = min(float(self._most), max(float(self._least), wanted))

    def abandoned(self) -> None:
        """A step of the batch's was given up for somebody more urgent."""
        self._abandoned += 1
