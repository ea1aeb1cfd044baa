"""Jobs of RQ: each has one batch run by some batch worker. The only module of the queue that knows RQ.

RQ hands jobs out; it neither fences nor recovers fast. Who may write for a batch says its lease (batches.py), and what
RQ lost or left lying is put right by `ensure`, which somebody calls for every batch that nobody runs. Two jobs for one
batch do no harm: the second runner finds it held. So nothing here must be atomic, only repeated.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from typing import Any

import redis
from redis.backoff import NoBackoff
from redis.exceptions import RedisError
from redis.retry import Retry as NoRetry
from rq import Queue, Retry
from rq.exceptions import InvalidJobOperation
from rq.job import Job
from rq.serializers import JSONSerializer
from rq.utils import str_to_date

from .client import translate

#: What a batch worker runs, and nothing else: whoever can write to Redis must not be able to choose code.
FUNCTION = "prelay_batch.job.run_batch"
#: How often RQ itself runs a batch again whose work horse died or failed.
RETRIES = 5
#: A job that began so lately may not have come to its batch's lease yet. Milliseconds.
STARTING_MS = 10_000
#: A job that a worker has taken and not begun for so long is of a dead worker. Milliseconds.
MOVING_MS = 4_000
#: How long RQ keeps a failed job for whoever wonders why. Seconds.
FAILURE_TTL_S = 86_400
#: The lock lasts so long if whoever has it dies. Milliseconds.
_LOCK_MS = 5_000
_UNLOCK = "if redis.call('GET', KEYS[1]) == ARGV[1] then return redis.call('DEL', KEYS[1]) end return 0"


def queue_name(fleet: str) -> str:
    """The name of the RQ queue of a fleet's batches."""
    return f"prelay-batch-{fleet}"


@dataclass(frozen=True, slots=True)
class Standing:
    """Where RQ has a job. `status` is '' for none; times in ms, 0 where there is none."""

    status: str = ""
    listed: bool = False  # among those that wait for a worker
    moving_ms: int = 0  # a worker has taken it, and it has been seen so for this long
    started_ms: int = 0  # since it began

    @property
    def will_run(self) -> bool:
        """Whether it will be run, or just begins to be, as far as one can see."""
        if self.status == "queued":
            return self.listed or 0 < self.moving_ms < MOVING_MS
        return self.status == "started" and 0 < self.started_ms < STARTING_MS


class BatchJobs:
    """The RQ queue of one fleet. Safe to share between threads. Every method raises QueueUnavailable or QueueError."""

    def __init__(self, url: str, fleet: str) -> None:
        """`url` of a plain Redis, no cluster: RQ knows none."""
        pool = redis.BlockingConnectionPool.from_url(
            url, max_connections=4, timeout=2, socket_timeout=2, socket_connect_timeout=2, protocol=2,
            retry=NoRetry(NoBackoff(), 0),  # RQ's commands are not idempotent
        )  # fmt: skip
        self.redis = redis.Redis(connection_pool=pool)
        self.queue = Queue(queue_name(fleet), connection=self.redis, serializer=JSONSerializer, default_timeout=-1)
        self._prefix = f"prelay-batch:{{{fleet}}}:"

    def ensure(self, batch: str) -> bool:
        """See to it that a batch that nobody runs will be run. True when it was not to be; a repeat changes nothing.

        A job that is said to run while nobody has the batch is its dead worker's, unless it began just now.
        """
        try:
            return self._locked(batch)
        except RedisError as error:
            raise translate(error) from None

    def forget(self, batch: str) -> None:
        """Take the job of a batch that is over out of RQ."""
        try:
            self._remove(batch)
        except RedisError as error:
            raise translate(error) from None

    def close(self) -> None:
        self.redis.connection_pool.disconnect()

    def _locked(self, batch: str) -> bool:
        """Of those who come at once one acts: all others see what it did the next time."""
        lock, token = f"{self._prefix}lock:{batch}", secrets.token_hex(8)
        if not self.redis.set(lock, token, nx=True, px=_LOCK_MS):
            return False
        try:
            if self._look(batch).will_run:
                return False
            self._remove(batch)
            self._enqueue(batch)
            return True
        finally:
            self.redis.eval(_UNLOCK, 1, lock, token)

    def _look(self, batch: str) -> Standing:
        with self.redis.pipeline(transaction=True) as pipe:
            pipe.hmget(Job.key_for(batch), "status", "started_at", "data")
            pipe.lpos(self.queue.key, batch)
            pipe.lpos(self.queue.intermediate_queue_key, batch)
            pipe.time()
            fields, listed, moving, now = pipe.execute()
        status, started, data = fields
        if data is None:  # what RQ takes for no job
            return Standing()
        now_ms = int(now[0]) * 1000 + int(now[1]) // 1000
        return Standing(
            status=(status or b"").decode(errors="replace"),
            listed=listed is not None,
            moving_ms=self._moving_ms(batch, now_ms) if moving is not None and listed is None else 0,
            started_ms=now_ms - _moment_ms(started),
        )

    def _moving_ms(self, batch: str, now_ms: int) -> int:
        """How long it has been seen between a worker's hand and its start; the first look notes the moment."""
        key = f"{self._prefix}moving:{batch}"
        self.redis.set(key, now_ms, nx=True, px=4 * MOVING_MS)
        return max(1, now_ms - int(self.redis.get(key) or now_ms))

    def _remove(self, batch: str) -> None:
        """Also from RQ's lists, where it may stand more than once, and its registries."""
        job = Job(batch, connection=self.redis, serializer=JSONSerializer)
        job.origin = self.queue.name
        try:
            job.delete()
        except (ValueError, InvalidJobOperation):  # it has no status, or one that RQ does not know
            self.redis.delete(job.key)
        self.redis.lrem(self.queue.key, 0, batch)
        self.redis.lrem(self.queue.intermediate_queue_key, 0, batch)
        self.redis.delete(f"{self._prefix}moving:{batch}")

    def _enqueue(self, batch: str) -> None:
        self.queue.enqueue_call(
            FUNCTION, args=(batch,), job_id=batch, description=batch, timeout=-1, result_ttl=0,
            failure_ttl=FAILURE_TTL_S, retry=Retry(max=RETRIES),
        )  # fmt: skip


def _moment_ms(raw: Any) -> int:
    """RQ's words for a moment, in ms; 0 for none that one can read."""
    try:
        return int(str_to_date(raw).timestamp() * 1000) if raw else 0
    except (ValueError, UnicodeDecodeError):
        return 0
