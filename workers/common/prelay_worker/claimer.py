"""The claim thread: takes entries from the work streams in serving order and claims the jobs they name."""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import takewhile
from typing import Any

from redis.exceptions import RedisError, ResponseError

from prelay_queue.client import SyncQueue, is_missing_group
from prelay_queue.errors import QueueError, QueueUnavailable
from prelay_queue.job import PROTOCOL_VERSION
from prelay_queue.keys import GROUP
from prelay_queue.logs import about
from prelay_queue.recorder import NOBODY, Recorder
from prelay_queue.scripts import text

from .admission import Admission
from .lease import LeaseKeeper
from .messages import Claimed, Message, key_of
from .policy import CLASSES, claim_order

log = logging.getLogger("prelay.claim")

#: Entries at the front of a prefill stream among which a decode worker looks for a short one.
LOOK_AHEAD = 8

#: Jobs that are claimed at a time, at the most, and of how many that wait one may be: so a short queue goes round the
#: workers job by job, and a long one costs each of them a few round trips for many.
MOST_AT_ONCE = 16
SHARE = 16

#: While only the upper classes may be claimed, their streams are waited for no longer than this, seconds. Where there
#: is no room for them they are not waited for in a blocking read, but looked at this often: a worker with room, which
#: does wait, is to have such a job first.
LOOK_S = 0.05


class Claimer:
    """Claims jobs of one stage for one worker while `admission` is open."""

    def __init__(
        self,
        queue: SyncQueue,
        worker: str,
        stage: str,
        admission: Admission,
        leases: LeaseKeeper,
        post: Callable[[Message], None],
        short_tokens: int = 0,
        recorder: Recorder = NOBODY,
    ) -> None:
        """`short_tokens`: with room to spare, also take prefills of up to so many tokens that nobody has taken."""
        self._queue = queue
        self._worker = worker
        self._streams = queue.keys.work(stage)
        self._short_tokens = short_tokens
        self._prefills = queue.keys.work("prefill")
        self._admission = admission
        self._leases = leases
        self._post = post
        self._recorder = recorder
        self._reader = queue.reader()
        self._stopping = threading.Event()
        self._recover_own = True  # after any error: look at our own pending entries first
        self._asked: list[tuple[str, str, str]] = []  # claims (stream, entry, job) whose answer never came
        self._cursors = dict.fromkeys(self._streams, "0-0")
        self._steal_at = [0.0] * (CLASSES + 1)  # monotonic seconds, by how many classes may be claimed
        self._turn = 0
        self._thread = threading.Thread(target=self._run, name="claim", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Claims nothing after this returns (a blocked read ends within a second)."""
        self._stopping.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stopping.is_set():
            classes = self._admission.wait_open(0.5)
            if not classes:
                continue
            try:
                self._turn_once(classes)
            except ResponseError as error:
                if not is_missing_group(error):
                    log.error("claim: %s", error)
                    self._stopping.wait(1)
                self._make_groups()
            except (RedisError, QueueError) as error:
                log.warning("claim: %s", error)
                self._recover_own = True
                self._stopping.wait(0.2 + random.random() * 0.3)  # noqa: S311 - jitter

    def _make_groups(self) -> None:
        for stream in self._streams:
            try:
                self._queue.redis.xgroup_create(stream, GROUP, id="0", mkstream=True)
            except RedisError as error:
                if not str(error).startswith("BUSYGROUP"):  # full, read-only or away: the next read asks again
                    log.warning("claim: %s", error)
                    self._stopping.wait(0.5)

    def _turn_once(self, classes: int) -> None:
        """1 what an error left open, 2 others' abandoned entries, 3 new ones in order, 4 short prefills, 5 block.

        While only the upper `classes` may be claimed, none of it looks at the others, but what an error left open and
        the turn of a batch job that others would always pass.
        """
        if self._recover_own:
            self._recover()
        if time.monotonic() >= self._steal_at[classes] and self._steal(classes):
            return
        filled = self._filled(self._streams)
        order = self._order(filled, classes)
        for stream in order:
            count = self._at_once(stream, filled[stream]) if len(order) == 1 else 1
            if self._take(self._read([stream], ">", None, count)):
                return
        if self._short_tokens and self._take_short(classes):
            return
        if classes < CLASSES and not self._admission.has_room:
            self._admission.wait_wider(classes, LOOK_S)
        else:
            block_ms = int(LOOK_S * 1000) if self._short_tokens or classes < CLASSES else 1000
            self._take(self._read(list(self._streams[: 2 * classes]), ">", block_ms))

    def _take_short(self, classes: int) -> bool:
        """Claim the first short prefill that waits, if one does.

        The entry is not delivered to us, only looked at: an idle prefill worker, which waits in a blocking read, has
        had its chance. Whoever is handed it at this moment finds its own claim stale, as after any late delivery.
        """
        for stream in self._filled(self._prefills[: 2 * classes]):
            entries: Any = self._queue.redis.xrange(stream, count=LOOK_AHEAD)
            for entry, fields in entries:
                short = int(fields.get(b"tok", self._short_tokens + 1)) <= self._short_tokens
                if short and self._claim([(stream, text(entry), text(fields[b"id"]))]):
                    return True
        return False

    def _recover(self) -> None:
        """At the start and after an error: the claim that got no answer, our pending entries, dead consumers."""
        self._claim(self._asked)
        for stream in self._streams:
            self._take(self._read([stream], "0", None))
        self._queue.run(self._queue.scripts.tidy())
        self._recover_own = False

    def _order(self, filled: dict[str, int], classes: int) -> list[str]:
        """Those to read, in serving order, with a share for the lower classes, so that none starves."""
        pairs = [self._streams[i : i + 2] for i in range(0, 2 * CLASSES, 2)]
        queued = [urgency for urgency, pair in enumerate(pairs) if any(stream in filled for stream in pair)]
        self._turn += 1
        order = claim_order(self._turn, classes, self._admission.unserved, queued)
        return [stream for urgency in order for stream in pairs[urgency] if stream in filled]

    def _filled(self, streams: tuple[str, ...]) -> dict[str, int]:
        """Those that hold entries, and how many, by one look instead of a read of each."""
        with self._queue.redis.pipeline(transaction=False) as pipe:
            for stream in streams:
                pipe.xlen(stream)
            return {stream: length for stream, length in zip(streams, pipe.execute(), strict=True) if length}

    def _at_once(self, stream: str, length: int) -> int:
        """How many to take of a stream, while no other has anything: what a long queue spares, and there is room for.

        A job that runs alone is taken alone.
        """
        most = min(MOST_AT_ONCE, length // SHARE)
        if most <= 1:
            return 1
        entries: Any = self._queue.redis.xrange(stream, count=most)
        fields = [found for _, found in entries]
        together = takewhile(lambda found: found.get(b"al") == b"0", fields)
        return max(1, self._admission.room_for(int(found.get(b"tok", 0)) for found in together))

    def _read(self, streams: list[str], cursor: str, block_ms: int | None, count: int = 1) -> Any:
        asked: dict[Any, Any] = dict.fromkeys(streams, cursor)
        return self._reader.xreadgroup(GROUP, self._worker, asked, count=count, block=block_ms)

    def _take(self, reply: Any) -> bool:
        """Claim what was read; whether there was anything."""
        taken = False
        for stream, entries in reply or ():
            taken = taken or bool(entries)
            self._claim_entries(text(stream), entries)
        return taken

    def _steal(self, classes: int) -> bool:
        """Take over what a consumer was handed and never claimed. The cursor goes on where it ended."""
        stolen, idle_ms = False, self._queue.settings.times.pending_idle_ms
        for stream in self._streams[: 2 * classes]:
            cursor, entries, *_ = self._queue.redis.xautoclaim(
                stream, GROUP, self._worker, min_idle_time=idle_ms, start_id=self._cursors[stream], count=1
            )
            self._cursors[stream] = text(cursor)
            self._recorder.inc("prelay_redeliveries_total", by=len(entries))
            self._claim_entries(stream, entries)
            stolen = stolen or bool(entries)
        if not stolen:
            self._steal_at[classes] = time.monotonic() + idle_ms / 2000
        return stolen

    def _claim_entries(self, stream: str, entries: Any) -> None:
        named = [(text(entry), (fields or {}).get(b"id")) for entry, fields in entries]
        for entry, job in named:
            if job is None:  # deleted while it was pending, or not one of ours
                self._queue.redis.xack(stream, GROUP, entry)
                self._queue.redis.xdel(stream, entry)
        self._claim([(stream, entry, text(job)) for entry, job in named if job is not None])

    def _claim(self, asked: list[tuple[str, str, str]]) -> bool:
        """Claim and tell the model loop; whether any job is ours now.

        Claims that get no answer may be ours: they are repeated by `_recover`. A job that nobody can read is raised
        after the others: its lease ends, and after some times the job.
        """
        if not asked:
            return False
        self._asked = asked
        lease_ms = self._queue.settings.times.lease_ms
        scripts = self._queue.scripts
        answers = self._queue.run_many([scripts.claim(*each, self._worker, lease_ms) for each in asked])
        for answer in answers:
            if isinstance(answer, QueueUnavailable):
                raise answer
        self._asked = []
        ours = [self._taken(*each, answer) for each, answer in zip(asked, answers, strict=True)]
        for answer in answers:
            if isinstance(answer, QueueError):
                raise answer
        return any(ours)

    def _taken(self, _stream: str, entry: str, job: str, answer: Any) -> bool:
        """What a claim was answered; whether the job is ours now."""
        claim = None if isinstance(answer, QueueError) else answer.claim
        if claim is None:
            if not isinstance(answer, QueueError) and answer.code == "newer":
                words = "job %s speaks a newer protocol than this worker's %d: left alone"
                log.warning(words, job, PROTOCOL_VERSION, extra=about(job))
                self._stopping.wait(0.2)  # a newer worker takes it meanwhile
            return False
        self._leases.hold(claim.id, claim.epoch)
        tokens = len(claim.spec.prompt_ids) + len(claim.ids)
        self._admission.charge(key_of(claim.id, claim.epoch), tokens, claim.alone)
        queued_ms = int(entry.partition("-")[0])  # the server's time at which it was put there
        self._post(Claimed(replace(claim, queued_ms=queued_ms)))
        return True
