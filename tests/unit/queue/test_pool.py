"""The pool of connections: in turn, none lost, and patient as long as it goes on."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from redis.exceptions import ConnectionError as RedisConnectionError

from prelay_queue.pool import FairPool


class Line:
    """A connection to nothing. `broken`: it cannot be made."""

    broken = False

    def __init__(self, **_: Any) -> None:
        pass

    async def connect(self) -> None:
        await asyncio.sleep(0)
        if self.broken:
            raise RedisConnectionError("nobody there")

    async def can_read(self) -> bool:
        return False

    async def disconnect(self) -> None:
        pass

    async def re_auth(self) -> None:
        pass

    def should_reconnect(self) -> bool:
        return False


class Broken(Line):
    broken = True


def pool_of(count: int, patience_s: float = 60.0, kind: type[Line] = Line) -> FairPool:
    return FairPool(max_connections=count, patience_s=patience_s, connection_class=kind)


async def free_of(pool: FairPool, count: int) -> None:
    """So many are free, and no more."""
    taken = [await asyncio.wait_for(pool.get_connection(), 1) for _ in range(count)]
    one_more = asyncio.create_task(pool.get_connection())
    await asyncio.sleep(0.01)
    assert not one_more.done()
    one_more.cancel()
    for connection in taken:
        await pool.release(connection)


async def test_who_waits_is_served_in_turn_and_before_whoever_comes_later() -> None:
    pool, order = pool_of(1), []

    async def use(n: int) -> None:
        connection = await pool.get_connection()
        order.append(n)
        await asyncio.sleep(0)
        await pool.release(connection)
        if n < 5:  # and again at once: behind all others
            connection = await pool.get_connection()
            order.append(n + 10)
            await pool.release(connection)

    await asyncio.gather(*(use(n) for n in range(10)))
    assert order == [*range(10), *range(10, 15)]
    await free_of(pool, 1)


async def test_a_wait_lasts_as_long_as_others_get_theirs() -> None:
    pool = pool_of(2, patience_s=0.2)
    loop = asyncio.get_running_loop()
    began = loop.time()

    async def use() -> None:
        connection = await pool.get_connection()
        await asyncio.sleep(0.05)
        await pool.release(connection)

    await asyncio.gather(*(use() for _ in range(30)))
    assert loop.time() - began > 0.6  # three times as long as its patience
    await free_of(pool, 2)


async def test_when_no_connection_comes_back_all_that_wait_are_told() -> None:
    pool = pool_of(2, patience_s=0.1)
    held = [await pool.get_connection() for _ in range(2)]
    waiting = [asyncio.create_task(pool.get_connection()) for _ in range(5)]
    for task in waiting:
        with pytest.raises(RedisConnectionError, match=r"no connection came free in 0\.1 s"):
            await asyncio.wait_for(task, 5)
    for connection in held:
        await pool.release(connection)
    await free_of(pool, 2)


@pytest.mark.parametrize("moment", range(6))
async def test_who_is_cancelled_at_any_moment_takes_no_connection_along(moment: int) -> None:
    pool = pool_of(1)
    held = await pool.get_connection()
    waiting = [asyncio.create_task(pool.get_connection()) for _ in range(3)]
    await asyncio.sleep(0)
    if moment > 1:
        await pool.release(held)
    for _ in range(moment - 2):
        await asyncio.sleep(0)
    for task in waiting:
        task.cancel()
    for found in await asyncio.gather(*waiting, return_exceptions=True):
        if not isinstance(found, BaseException):
            await pool.release(found)
    if moment < 2:
        await pool.release(held)
    await free_of(pool, 1)


async def test_a_connection_that_cannot_be_made_gives_its_place_back() -> None:
    pool = pool_of(2, kind=Broken)
    for _ in range(5):
        with pytest.raises(RedisConnectionError, match="nobody there"):
            await asyncio.wait_for(pool.get_connection(), 1)
