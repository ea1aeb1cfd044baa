"""Work that waits for a disk or a blocking client, off the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")

#: Not asyncio's own threads: a disk that is slow must not hold up the prompts that are tokenised in those.
_threads = ThreadPoolExecutor(max_workers=4, thread_name_prefix="files")


async def in_thread(work: Callable[[], T]) -> T:
    """Run `work` in a thread. When cancelled it waits for the thread all the same: nothing goes on behind it."""
    running = asyncio.get_running_loop().run_in_executor(_threads, work)
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        await asyncio.wait([running])
        raise
