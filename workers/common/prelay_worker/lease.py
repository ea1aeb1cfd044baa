"""The lease thread: it renews what the worker holds, says that the worker lives, and sweeps for the fleet.

It is a thread of its own so that a long model step costs no lease, and it stops renewing when the model loop has
not stamped progress for `stall_ms`: a worker that hangs must lose its jobs.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable
from typing import Any

from redis.exceptions import RedisError

from prelay_kv.errors import KvError
from prelay_queue.client import SyncQueue
from prelay_queue.errors import QueueError
from prelay_queue.recorder import NOBODY, Recorder
from prelay_queue.scripts import Held
from prelay_queue.sweep import expire, say, say_expired, sweep
from prelay_text.fleet import STALE_MS

from .backend import Transport
from .messages import Message, Release, Stop

log = logging.getLogger("prelay.lease")

#: How often it is looked whether peers are dead whose memory is mapped here, ms.
DEAD_PEERS_MS = 500


class LeaseKeeper:
    """Leases, heartbeat and sweep of one worker. `hold`, `export`, `drop` and `stamp` are for other threads."""

    def __init__(
        self,
        queue: SyncQueue,
        worker: str,
        transport: Transport,
        post: Callable[[Message], None],
        recorder: Recorder = NOBODY,
    ) -> None:
        self._queue = queue
        self._times = queue.settings.times
        self._worker = worker
        self._transport = transport
        self._post = post
        self._recorder = recorder
        self._held: dict[tuple[str, int], str] = {}
        self._lock = threading.Lock()
        self._stamp = time.monotonic()
        self._status: dict[str, Any] = {}
        self._stopping = threading.Event()
        self._contact_since: float | None = None
        self._beaten: tuple[int, float] | None = None  # server ms and monotonic seconds of the last heartbeat
        self._thread = threading.Thread(target=self._run, name="lease", daemon=True)

    def start(self) -> None:
        self._attempt(self._beat)  # the others know of us before we take a job
        self._thread.start()

    def stop(self) -> None:
        self._stopping.set()
        self._thread.join()

    def hold(self, job: str, epoch: int) -> None:
        """I own this attempt."""
        with self._lock:
            self._held[job, epoch] = "run"

    def hand_over(self, job: str, epoch: int) -> None:
        """A hand-over is on its way: it is renewed as mine, and only its own answer says what became of it."""
        with self._lock:
            self._held[job, epoch] = "handing over"

    def export(self, job: str, epoch: int) -> None:
        """I hold this attempt's KV for a decode worker. Nothing happens if it was dropped meanwhile."""
        with self._lock:
            if (job, epoch) in self._held:
                self._held[job, epoch] = "export"

    def drop(self, job: str, epoch: int) -> None:
        with self._lock:
            self._held.pop((job, epoch), None)

    def stamp(self) -> None:
        """The model loop is alive."""
        self._stamp = time.monotonic()

    def publish(self, status: dict[str, Any]) -> None:
        """Replace what the heartbeat says about this worker."""
        self._status = status

    @property
    def server_ms(self) -> int:
        """What the server's clock shows by now, at least; 0 before it told."""
        if self._beaten is None:
            return 0
        told, at = self._beaten
        return told + int((time.monotonic() - at) * 1000)

    @property
    def progress_ms(self) -> int:
        return int((time.monotonic() - self._stamp) * 1000)

    def problems(self) -> list[str]:
        """Why this worker would take no job and finish none, as the fleet sees it; empty when it would."""
        state = self._status.get("state", "starting")
        silence_ms = int((time.monotonic() - self._beaten[1]) * 1000) if self._beaten else None
        found = [] if state == "ready" else [f"the worker is {state}"]
        if silence_ms is None:
            found.append("Redis has not heard of this worker yet")
        elif silence_ms > STALE_MS:
            found.append(f"Redis has not answered for {silence_ms} ms")
        if self.progress_ms > STALE_MS:
            found.append(f"the model loop has not moved for {self.progress_ms} ms")
        return found

    def _run(self) -> None:
        due = {
            self._renew: self._times.renew_ms,
            self._beat: self._times.heartbeat_ms,
            self._sweep: self._times.sweep_ms,
            self._expire: self._times.deadline_check_ms,
            self._forget_lost_peers: self._times.worker_ttl_ms // 3,
            self._forget_dead_peers: DEAD_PEERS_MS,
        }
        at = {task: time.monotonic() + every / 1000 for task, every in due.items()}
        while not self._stopping.wait(max(0.01, min(at.values()) - time.monotonic())):
            for task, every in due.items():
                if time.monotonic() >= at[task]:
                    self._attempt(task)
                    at[task] = time.monotonic() + every / 1000 * random.uniform(0.9, 1.1)  # noqa: S311 - jitter

    def _attempt(self, task: Callable[[], None]) -> None:
        try:
            task()
            self._contact_since = self._contact_since or time.monotonic()
        except (QueueError, RedisError) as error:
            if self._contact_since is not None:
                log.warning("lost contact with Redis: %s", error)
            self._contact_since = None

    def _renew(self) -> None:
        if self.progress_ms > self._times.stall_ms:
            log.error("the model loop has not moved for %d ms: leases are not renewed", self.progress_ms)
            return
        with self._lock:
            held = [Held(job, epoch, kind) for (job, epoch), kind in self._held.items()]
        # On the wire a hand-over is still a run: the lease is ours until the script has moved it.
        sent = [Held(h.job, h.epoch, "export" if h.kind == "export" else "run") for h in held]
        if not held:
            return
        times = self._times
        answers = self._queue.run(self._queue.scripts.renew(self._worker, times.lease_ms, sent, times.stranded_ms))
        for item, answer in zip(held, answers, strict=True):
            self._act(item, answer)

    def _act(self, item: Held, answer: str) -> None:
        if answer in ("kept", "hold") or item.kind == "handing over":
            return
        with self._lock:
            if self._held.get((item.job, item.epoch)) != item.kind:
                return  # it moved on while the answer travelled
        if answer == "release":
            self._post(Release(item.job, item.epoch))
        else:
            self._post(Stop(item.job, item.epoch, answer))

    def _beat(self) -> None:
        status = {**self._status, "progress_ms": self.progress_ms}
        server_ms = self._queue.run(self._queue.scripts.beat(self._worker, status, self._times.worker_ttl_ms))
        if self._beaten is not None and server_ms - self._beaten[0] > self._times.lease_ms / 2:
            # Redis, this host or this process stood still. Others may have too, and need one lease to renew.
            self._contact_since = None
        self._beaten = (server_ms, time.monotonic())

    def _forget_dead_peers(self) -> None:
        """On a GPU the successor of a dead worker waits for its memory."""
        for peer in self._transport.orphans():
            log.info("unmapping the KV of dead worker %s", peer)
            self._forget(peer)

    def _forget_lost_peers(self) -> None:
        """A mapping pins its owner's memory: unmap the peers whose heartbeat is gone. A later copy maps again."""
        for peer in self._transport.peers():
            if not self._queue.redis.exists(self._queue.keys.worker(peer)):
                log.info("unmapping the KV of lost worker %s", peer)
                self._forget(peer)

    def _forget(self, peer: str) -> None:
        """A GPU that cannot even unmap ends the model loop, which asks more of it; this thread has leases to renew."""
        try:
            self._transport.forget(peer)
        except KvError as error:
            log.error("the KV of %s cannot be unmapped: %s", peer, error)

    def _sweep(self) -> None:
        # An outage must not expire the world: the holders need one lease to renew first.
        since = self._contact_since
        if since is None or (time.monotonic() - since) * 1000 < self._times.lease_ms or self._beaten is None:
            return
        say(self._queue.run(sweep(self._queue.scripts, self._times, self.server_ms)), self._recorder)

    def _expire(self) -> None:
        ended = self._queue.run(expire(self._queue.scripts))
        say_expired(ended, self._recorder)

    def farewell(self) -> None:
        """Remove the heartbeat: the fleet need not wait for it to expire."""
        keys = self._queue.keys
        self._queue.redis.delete(keys.worker(self._worker), keys.control(self._worker))
        self._queue.redis.zrem(keys.workers, self._worker)
