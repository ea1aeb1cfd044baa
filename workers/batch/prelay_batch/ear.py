"""What a runner hears of its jobs: a live stream of its own that has only ends and preempts."""

from __future__ import annotations

import logging
import secrets
import time
from typing import Any

from redis.exceptions import RedisError

from prelay_queue.client import SyncQueue, translate
from prelay_queue.errors import BadMessageError, QueueError
from prelay_queue.events import EndedEvent, LiveEvent, PreemptedEvent, decode_live
from prelay_queue.identity import incarnation
from prelay_queue.scripts import text

log = logging.getLogger("prelay.batch")

#: What a quiet viewer's name begins with: it hears ends and preempts only.
QUIET = "~"
#: It says that it lives this often, seconds.
HEARTBEAT_S = 5.0
#: Entries taken in one read.
READ_COUNT = 512


class Ear:
    """Never trusted: it may lose, double and reorder. `lost` says that the jobs have to be looked at."""

    def __init__(self, queue: SyncQueue) -> None:
        self.id = QUIET + incarnation()
        self.attachment = f"{self.id}#{secrets.token_hex(8)}"
        self.lost = True
        self._queue = queue
        self._reader = queue.reader()
        self._key = queue.keys.live(self.id)
        self._ttl_s = queue.settings.times.api_ttl_s
        self._last = ""  # entry up to which it was read; empty: the stream is to be made
        self._beat_at = 0.0

    def __repr__(self) -> str:
        return f"Ear({self.id}, last={self._last!r})"

    def listen(self, block_ms: int) -> list[EndedEvent | PreemptedEvent]:
        """What came, waiting up to `block_ms` (0: not at all) for anything. Raise QueueUnavailable, QueueError."""
        self._attend()
        try:
            reply: Any = self._reader.xread({self._key: self._last}, count=READ_COUNT, block=block_ms or None)
        except (RedisError, OSError) as error:
            self._last, self.lost = "", True
            raise translate(error) from None
        events: list[EndedEvent | PreemptedEvent] = []
        for _, entries in reply or ():
            for entry, fields in entries:
                self._last = text(entry)
                events.extend(_heard(fields.get(b"e", b"[]")))
        return events

    def close(self, *, jobs_left: bool) -> None:
        """Take our keys out of Redis. With `jobs_left` we stay in the list from which the dead are swept."""
        try:
            self._queue.redis.delete(self._key)
            if not jobs_left:
                self._queue.redis.zrem(self._queue.keys.apis, self.id)
        except RedisError as error:
            log.warning("cannot leave the queue: %s", error)

    def _attend(self) -> None:
        """Say that we live; make the stream where there is none (writers skip one that is not there)."""
        now = time.monotonic()
        if self._last and now < self._beat_at:
            return
        scripts = self._queue.scripts
        entry, _ = self._queue.run(scripts.attend(self.id, self._ttl_s, begin=not self._last))
        self._beat_at = now + HEARTBEAT_S
        if not self._last:
            self._last, self.lost = entry, True

    def check(self) -> None:
        """Is the stream still there? (One that was flushed just never answers a read.) Raise QueueError."""
        try:
            there = self._queue.redis.expire(self._key, self._ttl_s)
        except RedisError as error:
            raise translate(error) from None
        if not there:
            self._last = ""


def _heard(raw: bytes) -> list[EndedEvent | PreemptedEvent]:
    try:
        events: list[LiveEvent] = decode_live(raw)
    except BadMessageError as error:
        log.error("%s", error)
        return []
    return [event for event in events if isinstance(event, EndedEvent | PreemptedEvent)]


__all__ = ["Ear", "QueueError"]
