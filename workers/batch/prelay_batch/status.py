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
        self._lock = threading.Lock()

    def metrics(self) -> bytes:
        return self._metrics.text()

    def problems(self) -> list[str]:
        """Why no batch would run here now; empty when one would."""
        found = [] if os.access(self._folder, os.R_OK | os.W_OK | os.X_OK) else [f"cannot write to {self._folder}"]
        try:
            with self._lock:
                self._queue.redis.ping()
        except RedisError as error:
            found.append(f"Redis does not answer: {error}")
        return found


def show(config: BatchConfig) -> None:
    """Show it on the port that was asked for. Raise StartupError when that cannot be."""
    status, host, port = Status(config), config.metrics_host, config.metrics_port
    try:
        statuspage.show(host, port, status.metrics, status.problems)
    except OSError as error:
        raise StartupError(f"--metrics-port: cannot listen on {host} port {port}: {error.strerror}") from None
