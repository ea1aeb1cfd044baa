"""Lines that were read ahead, in the order in which they are run: those that share a prefix one after the other."""

from __future__ import annotations

import sys
from array import array
from collections import deque
from collections.abc import Iterable

from .life import Line


class Lookahead:
    """Lines that wait to be submitted.

    They are sorted group by group: what comes in while one group is handed out becomes the next one. So the first group
    is small and starts at once, and the next ones grow to what the lookahead holds. A line that is put back, because it
    has to be run again, is the next one.
    """

    def __init__(self, most_lines: int, most_bytes: int) -> None:
        self._most_lines, self._most_bytes = most_lines, most_bytes
        self._ready: deque[Line] = deque()
        self._coming: list[Line] = []
        self._bytes = 0

    def __len__(self) -> int:
        return len(self._ready) + len(self._coming)

    @property
    def has_room(self) -> bool:
        return len(self) < self._most_lines and (self._bytes < self._most_bytes or not len(self))

    def add(self, line: Line) -> None:
        self._coming.append(line)
        self._bytes += line.size

    def put_back(self, lines: Iterable[Line]) -> None:
        """These come first, in this order."""
        again = list(lines)
        self._ready.extendleft(reversed(again))
        self._bytes += sum(line.size for line in again)

    def next(self) -> Line | None:
        """Take the next line out."""
        if not self._ready:
            self._coming.sort(key=prefix_key)
            self._ready.extend(self._coming)
            self._coming.clear()
        if not self._ready:
            return None
        line = self._ready.popleft()
        self._bytes -= line.size
        return line

    def clear(self) -> list[Line]:
        """Take out all."""
        found = [*self._ready, *self._coming]
        self._ready.clear()
        self._coming.clear()
        self._bytes = 0
        return found


def prefix_key(line: Line) -> bytes:
    """Sorts lines by the ids of their first prompt: compared in one go, also where long prefixes agree."""
    ids = array("I", line.parts[0].prompt_ids)
    if sys.byteorder == "little":
        ids.byteswap()
    return ids.tobytes()
