"""The one ear of an API process: its live stream in Redis, read by one task and handed to the jobs relayed here.

The live path is only fast, never trusted: it may lose, double and reorder. After any error of the reader, and after
some seconds in which a job's relay learnt nothing, the job's state is looked at and its log read again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import time
from collections.abc import Iterator, Sequence
from itertools import chain, islice
from typing import Any

from redis.exceptions import RedisError

from prelay_queue import logs
from prelay_queue.client import AsyncQueue
from prelay_queue.errors import BadMessageError, QueueError
from prelay_queue.events import decode_live
from prelay_queue.identity import incarnation
from prelay_queue.scripts import text

from .contact import Contact
from .relay import Relay
from .subscription import Subscription
from .tasks import end, keep_running

log = logging.getLogger("prelay.hub")

#: A relay that has learnt nothing for this long has its job looked at, seconds.
SILENCE_S = 3.0
#: Jobs looked at in one round trip.
LOOK_AT_ONCE = 64
#: Logs read at the same time, so that a reader error does not read a thousand at once.
LOGS_AT_ONCE = 6
#: The heartbeat and the life of the live stream are refreshed this often, seconds.
HEARTBEAT_S = 5.0
#: Entries taken in one read of the live stream.
READ_COUNT = 256


def _groups(items: Sequence[Subscription], size: int) -> Iterator[list[Subscription]]:
    rest = iter(items)
    while group := list(islice(rest, size)):
        yield group


class Hub:
    """The live stream and the subscriptions of one API process."""

    def __init__(self, queue: AsyncQueue, name: str = "") -> None:
        """`name` is what the process is known by; its own if absent."""
        self.queue = queue
        self.id = name or incarnation()
        self.contact = Contact()
        self.logs = asyncio.Semaphore(LOGS_AT_ONCE)
        self._key = queue.keys.live(self.id)
        self._ttl_s = queue.settings.times.api_ttl_s
        self._reader = queue.reader()
        self._last = ""  # entry up to which the live stream was read; empty: it is to be made
        self._subscriptions: dict[str, list[Subscription]] = {}  # of a job that several clients watch here, several
        self._tasks: list[asyncio.Task[None]] = []

    def __repr__(self) -> str:
        return f"Hub({self.id}, jobs={len(self._subscriptions)}, {self.contact!r})"

    def start(self) -> None:
        """Begin to listen; Redis need not be there yet."""
        works = {"hub read": self._read, "hub beat": self._beat, "hub watch": self._watch}
        self._tasks = [keep_running(name, work) for name, work in works.items()]

    async def stop(self, *, lingering: bool) -> None:
        """Stop listening and take our keys out of Redis, if it answers.

        `lingering`: some jobs are watched in our name, so we stay in the list from which the dead are swept.
        """
        await end(*self._tasks)
        with contextlib.suppress(RedisError, TimeoutError):
            async with asyncio.timeout(1):
                await self.queue.redis.delete(self._key)
                if not lingering:
                    await self.queue.redis.zrem(self.queue.keys.apis, self.id)

    def subscribe(self, job: str, relay: Relay) -> Subscription:
        """Hear of `job` from now on. Do it before the submit, so that no event is missed."""
        subscription = Subscription(job, relay)
        self._subscriptions.setdefault(job, []).append(subscription)
        return subscription

    def unsubscribe(self, subscription: Subscription) -> None:
        others = [other for other in self._subscriptions.pop(subscription.job, ()) if other is not subscription]
        if others:
            self._subscriptions[subscription.job] = others

    # --- the reader

    async def _read(self) -> None:
        self._last = ""
        delay = 0.05
        while True:
            try:
                if not self._last:
                    await self._establish()
                reply: Any = await self._reader.xread({self._key: self._last}, count=READ_COUNT, block=1000)
                if not reply:
                    await self._refresh()
                self.contact.ok()
                delay = 0.05
            except (RedisError, OSError, QueueError) as error:
                self._lose_contact(error)
                await asyncio.sleep(delay * random.uniform(0.5, 1.5))  # noqa: S311 - jitter
                delay = min(2 * delay, 1.0)
                continue
            for _, entries in reply or ():
                for entry, fields in entries:
                    self._last = text(entry)
                    self._dispatch(fields.get(b"e", b"[]"))

    async def _establish(self) -> None:
        """Make the live stream (writers skip one that is not there) and let every relay look at its log."""
        self._last = await self._say_alive(begin=True)
        logs.name_process(api=self.id)
        log.info("listening as %s", self.id)
        for subscription in self._all():
            subscription.want_log()

    async def _refresh(self) -> None:
        """Nothing came for a second: is the stream still there? (A flushed key just never answers a read.)"""
        if not await self.queue.redis.expire(self._key, self._ttl_s):
            log.warning("the live stream is gone: Redis lost data; every open request looks at its log")
            self._last = ""

    def _lose_contact(self, error: Exception) -> None:
        if self._last:
            log.warning("lost contact with Redis: %s", str(error) or type(error).__name__)
        self._last = ""
        self.contact.lost()

    def _dispatch(self, raw: bytes) -> None:
        try:
            events = decode_live(raw)
        except BadMessageError as error:
            log.error("%s", error)
            return
        for event in events:
            for subscription in self._subscriptions.get(event.job, ()):
                subscription.put(event)

    def _all(self) -> Iterator[Subscription]:
        return chain.from_iterable(list(self._subscriptions.values()))

    # --- the heartbeat

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(HEARTBEAT_S * random.uniform(0.9, 1.1))  # noqa: S311 - jitter
            with contextlib.suppress(QueueError):
                await self._say_alive(begin=False)

    async def _say_alive(self, *, begin: bool) -> str:
        """Keep our keys for another while; with `begin` make the stream, and return the entry to read on from."""
        entry, server_ms = await self.queue.run(self.queue.scripts.attend(self.id, self._ttl_s, begin=begin))
        self.contact.at_server(server_ms)
        return entry

    # --- silence

    async def _watch(self) -> None:
        """Look at the jobs of relays that have learnt nothing for a while: a lost event never hangs a client."""
        while True:
            await asyncio.sleep(SILENCE_S / 6)
            before = time.monotonic() - SILENCE_S
            quiet = [s for s in self._all() if s.looked < before and not s.busy]
            for group in _groups(quiet, LOOK_AT_ONCE):
                try:
                    await self._look_at(group)
                except (RedisError, OSError):
                    break  # the reader says it

    async def _look_at(self, group: list[Subscription]) -> None:
        async with self.queue.redis.pipeline(transaction=False) as pipe:
            for subscription in group:
                pipe.hmget(self.queue.keys.job(subscription.job), "st", "ep", "nx")
            found: list[Any] = await pipe.execute()
        now = time.monotonic()
        for subscription, (state, epoch, emitted) in zip(group, found, strict=True):
            subscription.looked = now
            if state is None or not subscription.knows(text(state), int(epoch), int(emitted)):
                subscription.want_log()
