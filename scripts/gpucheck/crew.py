"""The child processes that run the checks of one part, one check at a time each."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence

from .board import Board
from .budget import Budget
from .catalogue import Check, Part
from .folders import command
from .found import FAILED, SKIPPED, Found
from .lines import Asked, Silent


class Crew:
    """Runs the checks of `part`. A child that ends or hangs is replaced; the check that it was at has failed."""

    def __init__(
        self, part: Part, board: Board, budget: Budget, environment: Mapping[str, str], rehearse: bool
    ) -> None:
        self._part, self._board, self._budget = part, board, budget
        self._environment, self._rehearse = environment, rehearse
        self._waiting: deque[Check] = deque()
        self._ends = 0.0

    def run(self, checks: Sequence[Check], ends: float) -> None:
        """Returns when all are done, or `ends`, a moment of the monotonic clock, leaves no time for the rest."""
        self._waiting.extend(checks)
        self._ends = ends
        jobs = min(self._part.jobs, len(checks), 2 if self._rehearse else len(checks))
        threads = [threading.Thread(target=self._work, daemon=True) for _ in range(jobs)]
        for thread in threads:
            thread.start()
        for thread in threads:
            while thread.is_alive():  # so that Ctrl-C comes through
                thread.join(0.2)

    def _work(self) -> None:
        child: Asked | None = None
        while True:
            try:
                check = self._waiting.popleft()
            except IndexError:
                break
            now = time.monotonic()
            if why := self._budget.refusal(now, check, self._ends):
                self._board.note(check, Found(SKIPPED, why=why))
                continue
            child = self._try(child, check, now + self._budget.limit_s(now, check))
        if child is not None:
            child.close()

    def _try(self, child: Asked | None, check: Check, until: float) -> Asked | None:
        """The child for the next check, None if it is gone."""
        began = time.monotonic()
        try:
            child = child or self._start()
            self._board.say(f"begins  {check.full_name}")
            child.tell(check.full_name)
            while "say" in (message := child.hear(until)):
                self._board.say(f"  {check.full_name}: {message['say']}")
            found = Found(**message["found"])
        except (Silent, ValueError, TypeError, KeyError, OSError) as error:  # whatever it did: the others go on
            if child is not None:
                child.kill()
            self._board.note(check, Found(FAILED, why=f"its process: {error}", seconds=time.monotonic() - began))
            return None
        self._board.note(check, found)
        if message["broken"]:
            child.close()
            return None
        return child

    def _start(self) -> Asked:
        rehearse = ["--rehearse"] if self._rehearse else []
        return Asked(command("--child", self._part.name, *rehearse), self._environment)
