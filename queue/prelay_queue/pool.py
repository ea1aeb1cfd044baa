"""A pool of connections for asyncio that is fair, and that tells a burst of its own from a server that hangs."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Any

import redis.asyncio as aredis
from redis.exceptions import ConnectionError as RedisConnectionError


class FairPool(aredis.ConnectionPool):
    """At most `max_connections`. Who finds none free waits in turn, for as long as others get and give back theirs.

    The driver's own pool gives up after a time, however well the server answers: of six hundred requests that come
    at once the last would be told that Redis is away. Here a wait fails, with the driver's ConnectionError, when for
    `patience_s` no connection has changed hands: then the server hangs. A cancelled `get_connection` holds none.
    """

    def __init__(self, *, patience_s: float = 2.0, **options: Any) -> None:
        super().__init__(**options)
        self._patience_s = patience_s
        self._places = self.max_connections
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._moved = 0.0  # when a connection last changed hands, by the loop's clock
        self._watch: asyncio.TimerHandle | None = None

    async def get_connection(self, command_name: Any = None, *_: Any, **__: Any) -> Any:  # noqa: ARG002 - the driver's
        await self._take_place()
        try:
            connection: Any = self.get_available_connection()  # type: ignore[no-untyped-call]
        except BaseException:
            self._give_place()
            raise
        try:
            await self.ensure_connection(connection)
        except BaseException:
            await self.release(connection)
            raise
        return connection

    async def release(self, connection: Any) -> None:
        try:
            await super().release(connection)
        finally:
            self._give_place()

    async def _take_place(self) -> None:
        loop = asyncio.get_running_loop()
        if self._places:
            self._places -= 1
            self._moved = loop.time()
            return
        turn: asyncio.Future[None] = loop.create_future()
        self._waiting.append(turn)
        if self._watch is None:
            self._look_later(loop)
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled() and turn.exception() is None:  # it was given at the same moment
                self._give_place()
            raise

    def _give_place(self) -> None:
        """To whoever has waited longest, at once: nobody who comes now may be faster."""
        self._moved = asyncio.get_running_loop().time()
        while self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_result(None)
                return
        self._places += 1

    def _look_later(self, loop: asyncio.AbstractEventLoop) -> None:
        self._watch = loop.call_at(self._moved + self._patience_s, self._look, loop)

    def _look(self, loop: asyncio.AbstractEventLoop) -> None:
        """Does it go on for those who wait?"""
        self._watch = None
        if loop.time() - self._moved >= self._patience_s:
            while self._waiting:
                turn = self._waiting.popleft()
                if not turn.done():
                    turn.set_exception(RedisConnectionError(f"no connection came free in {self._patience_s:g} s"))
        if self._waiting:
            self._look_later(loop)
