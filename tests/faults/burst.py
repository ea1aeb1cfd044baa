"""Clients that come all at once and, when they are refused, come back when they are told to."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from statistics import median

from tests.bed.chain import Stream, check_stream, stream
from tests.bed.http import client_of
from tests.faults.crowd import body
from tests.faults.traffic import COMPLETIONS


@dataclass
class Guest:
    """One client: when it was refused, with what promise, and when it was let in (monotonic seconds)."""

    prompt: list[int]
    refused: list[tuple[float, int]] = field(default_factory=list)
    let_in: float = 0.0
    stream: Stream = field(default_factory=Stream)

    @property
    def promised_s(self) -> int:
        """What it was told first."""
        return self.refused[0][1]

    @property
    def waited_s(self) -> float:
        """From the first refusal until it was let in."""
        return self.let_in - self.refused[0][0]


class Burst:
    """So many guests at some API processes, in a thread of their own."""

    def __init__(self, urls: Sequence[str], count: int, max_tokens: int, every_s: float = 0.0) -> None:
        self.max_tokens = max_tokens
        self.guests = [Guest([n, 3, 1, 4, 1, 5]) for n in range(count)]
        self._every_s = every_s
        self._pool = ThreadPoolExecutor(1)
        self._result = self._pool.submit(asyncio.run, self._come(urls))

    async def _come(self, urls: Sequence[str]) -> None:
        clients = [client_of(url) for url in urls]
        try:
            async with asyncio.TaskGroup() as group:
                for guest, client in zip(self.guests, itertools.cycle(clients), strict=False):
                    group.create_task(self._visit(guest, client))
                    await asyncio.sleep(self._every_s)
        finally:
            for client in clients:
                await client.aclose()

    async def _visit(self, guest: Guest, client: object) -> None:
        while True:
            found = guest.stream = Stream()
            asked = time.monotonic()
            await stream(client, COMPLETIONS, body(guest.prompt, self.max_tokens), found)  # type: ignore[arg-type]
            if found.status != 429:
                guest.let_in = asked
                return
            assert found.error is not None
            assert (found.error["type"], found.error["code"]) == ("requests", "rate_limit_exceeded"), found.error
            promised_s = int(found.headers["retry-after"])
            guest.refused.append((time.monotonic(), promised_s))
            await asyncio.sleep(promised_s)

    @property
    def done(self) -> bool:
        return self._result.done()

    def check(self, timeout_s: float = 60) -> None:
        """Every guest was let in at last, and got its whole answer, every token right."""
        self._result.result(timeout_s)
        self._pool.shutdown()
        for guest in self.guests:
            check_stream(guest.stream, guest.prompt, self.max_tokens)

    def report(self) -> dict[str, float]:
        """How honest promises were: seconds promised first and waited until let in, and how often one was refused."""
        late = [guest for guest in self.guests if guest.refused]
        if not late:
            return {"guests": len(self.guests), "refused": 0}
        over = sorted(guest.waited_s - guest.promised_s for guest in late)
        return {
            "guests": len(self.guests),
            "refused": len(late),
            "refusals_median": median(len(guest.refused) for guest in late),
            "refusals_most": max(len(guest.refused) for guest in late),
            "promised_median_s": median(guest.promised_s for guest in late),
            "waited_median_s": round(median(guest.waited_s for guest in late), 2),
            "waited_most_s": round(max(guest.waited_s for guest in late), 2),
            "over_median_s": round(median(over), 2),
            "over_p90_s": round(over[int(0.9 * (len(over) - 1))], 2),
            "kept_share": round(sum(len(guest.refused) == 1 for guest in late) / len(late), 2),
        }
