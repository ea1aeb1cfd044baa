"""Load on a server: so many requests at a time, or so many a second."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

from .client import Manner, send
from .figures import Sample
from .workload import Ask


@dataclass
class Level:
    """One load and what came of it. Requests that were stopped on the way are in `dropped` and in no figure."""

    samples: list[Sample] = field(default_factory=list)
    wall_s: float = 0.0
    dropped: int = 0
    stopped: bool = False
    #: How late requests were sent, seconds: an open loop whose client cannot keep up measures the client.
    lateness: list[float] = field(default_factory=list)


@dataclass
class Load:
    """Sends requests and counts what comes back. `stop` ends a level at once; `tell` hears of each answer."""

    client: httpx.AsyncClient
    manner: Manner
    stop: asyncio.Event
    tell: Callable[[Level], None] = lambda _: None

    async def closed(
        self, asks: Iterator[Ask], concurrency: int, *, count: int | None = None, duration_s: float | None = None
    ) -> Level:
        """Keep `concurrency` requests under way: `count` in all, or new ones for `duration_s`; those under way end."""
        level, begun = Level(), time.perf_counter()
        shared = itertools.islice(asks, count)

        async def lane() -> None:
            for ask in shared:
                if duration_s is not None and time.perf_counter() - begun >= duration_s:
                    return
                await self._one(level, ask, begun)

        await self._finish(level, begun, [asyncio.create_task(lane()) for _ in range(concurrency)])
        return level

    async def open(
        self, asks: Iterator[Ask], times: Sequence[float], enough: Callable[[Level], bool] = lambda _: False
    ) -> Level:
        """Send a request at each of `times`, whatever became of those before. `enough` may end the level early."""
        level, begun = Level(), time.perf_counter()
        done = asyncio.Event()

        async def one(at: float, ask: Ask) -> None:
            await asyncio.sleep(max(0.0, begun + at - time.perf_counter()))
            level.lateness.append(time.perf_counter() - begun - at)
            await self._one(level, ask, begun)
            if enough(level):
                done.set()

        tasks = [asyncio.create_task(one(at, ask)) for at, ask in zip(times, asks, strict=False)]
        await self._finish(level, begun, tasks, done)
        return level

    async def _one(self, level: Level, ask: Ask, begun: float) -> None:
        """A request that is cancelled on its way counts as dropped."""
        level.dropped += 1
        sample = await send(self.client, self.manner, ask, time.perf_counter() - begun)
        level.dropped -= 1
        level.samples.append(sample)
        level.wall_s = time.perf_counter() - begun
        self.tell(level)

    async def _finish(
        self, level: Level, begun: float, tasks: list[asyncio.Task[None]], done: asyncio.Event | None = None
    ) -> None:
        """Wait for all tasks, or for a reason to stop; in any case none is left. Raise what a task raised."""
        working = asyncio.create_task(_all(tasks))
        reasons = [asyncio.create_task(event.wait()) for event in (self.stop, done) if event is not None]
        try:
            await asyncio.wait([working, *reasons], return_when=asyncio.FIRST_COMPLETED)
            level.stopped = not working.done()
            if working.done():
                working.result()
            else:
                level.wall_s = time.perf_counter() - begun
        finally:
            ending: list[asyncio.Task[Any]] = [working, *tasks, *reasons]
            for task in ending:
                task.cancel()
            await asyncio.gather(*ending, return_exceptions=True)


async def _all(tasks: Sequence[asyncio.Task[None]]) -> bool:
    await asyncio.gather(*tasks)
    return True
