"""The control thread: commands to this worker (stop, release, preempt, drain) from its control stream.

It only makes things prompt. Everything it says is also found out by the next renewal or fenced write.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Any

import orjson
from redis.exceptions import RedisError

from prelay_queue.client import SyncQueue
from prelay_queue.scripts import text

from .messages import Drain, Evict, Message, Release, Stop

#: The stream is looked for this often, seconds: a read does not tell one that is empty from one that is not there.
CHECK_S = 1.0
#: After commands came the next are read this much later, seconds: under load they come hundreds a second.
PACE_S = 0.005

log = logging.getLogger("prelay.control")


class Control:
    """Reads `ctl:<worker>` and posts what it says to the model loop."""

    def __init__(self, queue: SyncQueue, worker: str, post: Callable[[Message], None]) -> None:
        self._queue = queue
        self._key = queue.keys.control(worker)
        self._post = post
        self._reader = queue.reader()
        self._last = "0-0"
        self._lost = True  # the stream is to be made
        self._check_at = 0.0  # monotonic seconds
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="control", daemon=True)

    def start(self) -> None:
        self._turn()  # whoever claims for us may write to it from now on
        self._thread.start()

    def ask_stop(self) -> None:
        """Its read ends within a second."""
        self._stopping.set()

    def stop(self) -> None:
        self.ask_stop()
        self._thread.join()

    def _create(self) -> None:
        """Senders use NOMKSTREAM, so the stream must exist: it is made by an entry of our own."""
        entry = self._queue.redis.xadd(self._key, {"c": b'{"op":"hello"}'}, maxlen=1000)
        self._queue.redis.expire(self._key, 60)
        self._last = text(entry)

    def _run(self) -> None:
        while not self._stopping.is_set():
            self._turn()
            if self._lost:
                self._stopping.wait(0.5)
            else:
                self._read()

    def _turn(self) -> None:
        now = time.monotonic()
        if not self._lost and now < self._check_at:
            return
        try:
            if self._lost or not self._queue.redis.exists(self._key):
                self._create()
            self._lost, self._check_at = False, now + CHECK_S
        except RedisError as error:
            log.warning("control: %s", error)
            self._lost = True

    def _read(self) -> None:
        try:
            reply: Any = self._reader.xread({self._key: self._last}, count=100, block=1000)
        except RedisError as error:
            log.warning("control: %s", error)
            self._lost = True
            return
        for _, entries in reply or ():
            for entry, fields in entries:
                self._last = text(entry)
                self._act(fields.get(b"c", b"{}"))
        if reply:
            self._stopping.wait(PACE_S)

    def _act(self, raw: bytes) -> None:
        try:
            command = orjson.loads(raw)
            op, job, epoch = command.get("op"), str(command.get("id", "")), int(command.get("ep", 0))
        except (ValueError, AttributeError, TypeError) as error:
            log.error("control: cannot read %r: %s", raw[:200], error)
            return
        match op:
            case "stop":
                self._post(Stop(job, epoch, "stopped"))
            case "release":
                self._post(Release(job, epoch))
            case "preempt":
                self._post(Evict(job, epoch))
            case "drain":
                self._post(Drain())
