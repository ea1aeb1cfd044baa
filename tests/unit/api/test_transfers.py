"""Transfers end when the process stops, and only then by that."""

from __future__ import annotations

import asyncio

import pytest

from prelay_api.errors import Closing
from prelay_api.transfers import Transfers


async def transfer(transfers: Transfers, begun: asyncio.Event) -> None:
    with transfers.one():
        begun.set()
        await asyncio.Event().wait()


async def test_a_transfer_under_way_is_told_that_the_process_stops() -> None:
    transfers, begun = Transfers(), asyncio.Event()
    task = asyncio.create_task(transfer(transfers, begun))
    await begun.wait()
    transfers.end()
    transfers.end()
    with pytest.raises(Closing):
        await task
    assert len(transfers) == 0
    with pytest.raises(Closing):
        await transfer(transfers, begun)


async def test_who_cancels_a_transfer_cancels_it() -> None:
    transfers, begun = Transfers(), asyncio.Event()
    task = asyncio.create_task(transfer(transfers, begun))
    await begun.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert len(transfers) == 0
