"""What a batch worker shows of itself. How far the batches are stands in Redis, and the API shows that."""

from __future__ import annotations

import os
import threading

from redis.exceptions import RedisError

from prelay_queue import statuspage
from prelay_queue.client import SyncQueue
from prelay_queue.metric_table import Part
from prelay_queue.metrics import Metrics

from .config import BatchConfig
from .errors import StartupError


class Status:
    """Looks when it is asked; the work horses have nothing to do with it."""

    def __init__(self, config: BatchConfig) -> None:
        self._metrics = Metrics(Part.EVERY)
        self._queue = SyncQueue(config.queue, self._metrics)
        self._folder = config.files_dir
        # A work horse is a fork, and a fork keeps locks as they are. So none is made while one of our threads looks:
        # that takes locks of others, too, those of the name lookup for one.
        self._lock = threading.Lock()
        os.register_at_fork(
            before=self._lock.acquire, after_in_parent=self._lock.release, after_in_child=self._lock.release
        )

    def metrics(self) -> bytes:
        with self._lock:
            return self._metrics.text()

    def problems(self) -> list[str]:
        """Why no batch would run here now; empty when one would."""
        with self._lock:
            return [*self._of_folder(), *self._of_redis()]

    def _of_folder(self) -> list[str]:
        there = os.access(self._folder, os.R_OK | os.W_OK | os.X_OK)
        return [] if there else [f"cannot write to {self._folder}"]

    def _of_redis(self) -> list[str]:
        try:
            self._queue.redis.ping()
        except RedisError as error:
            return [f"Redis does not answer: {error}"]
        return []


def show(config: BatchConfig) -> None:
    """Show it on the port that was asked for. Raise StartupError when that cannot be."""
    status, host, port = Status(config), config.metrics_host, config.metrics_port
    try:
        statuspage.show(host, port, status.metrics, status.problems)
    except OSError as error:
        raise StartupError(f"--metrics-port: cannot listen on {host} port {port}: {error.strerror}") from None
