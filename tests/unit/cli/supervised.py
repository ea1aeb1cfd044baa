"""What supervised children said, for tests that wait for it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class Lines:
    """What children said, and a way to wait for it."""

    def __init__(self) -> None:
        self.all: list[tuple[str, str]] = []
        self._changed = asyncio.Condition()
        self._new = asyncio.Event()

    def __call__(self, name: str, line: str) -> None:
        self.all.append((name, line))
        self._new.set()

    async def wait_for(self, wanted: Callable[[list[tuple[str, str]]], bool]) -> None:
        async with asyncio.timeout(20):
            while not wanted(self.all):
                self._new.clear()
                await self._new.wait()


def said(name: str, line: str, times: int = 1) -> Callable[[list[tuple[str, str]]], bool]:
    return lambda lines: lines.count((name, line)) >= times
