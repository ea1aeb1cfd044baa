"""A session as one body."""

from __future__ import annotations

import asyncio

from starlette.types import Receive

from .outcome import CANCELLED, CLOSING, Failure
from .session import Session
from .sse import client_gone

#: A wake-up lost is found again after this long, seconds.
_LOOK_S = 30.0


async def collect(session: Session, receive: Receive) -> bytes | Failure:
    """Wait for every choice and return the body, or what went wrong. Closes the session in any case.

    Nothing is delivered before the end, so a preempt restarts from scratch. A client that leaves ends it.
    """
    waiting = asyncio.create_task(_wait(session))
    leaving = asyncio.create_task(client_gone(receive))
    try:
        await asyncio.wait((waiting, leaving), return_when=asyncio.FIRST_COMPLETED)
        if (problem := session.failed()) is not None:
            return problem
        if session.handed_on:
            return CLOSING
        if not session.ended:
            return CANCELLED  # nobody reads it
        return session.whole()
    finally:
        session.close()
        for task in (waiting, leaving):
            task.cancel()
        await asyncio.gather(waiting, leaving, return_exceptions=True)


async def _wait(session: Session) -> None:
    while not session.ended and not session.handed_on and session.failed() is None:
        await session.wait(_LOOK_S)
