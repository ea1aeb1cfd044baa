"""The right to run a batch: taken, renewed with the progress, and given back."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator

from prelay_queue.batches import BatchProgress, BatchScripts, BatchStatus, Kept, Taken
from prelay_queue.client import SyncQueue
from prelay_queue.errors import QueueError

from .errors import LeaseLost

log = logging.getLogger("prelay.batch")

#: It is renewed this often, seconds.
RENEW_S = 1.0


class Lease:
    """The lease of one epoch, for one owner. Every write raises LeaseLost once it is another's."""

    def __init__(self, queue: SyncQueue, batch_id: str, epoch: int, owner: str, lease_ms: int) -> None:
        self.epoch = epoch
        self._queue = queue
        self._scripts = BatchScripts(queue.keys)
        self._who = batch_id, epoch, owner
        self._lease_ms = lease_ms

    def __repr__(self) -> str:
        return f"Lease{self._who}"

    def keep(self, status: BatchStatus, progress: BatchProgress) -> Kept:
        """Renew it and say how far the batch is. Raise LeaseLost, QueueUnavailable."""
        kept = self._queue.run(self._scripts.keep(*self._who, self._lease_ms, status, progress))
        if kept.code != "ok":
            raise LeaseLost(kept.code)
        return kept

    def give_back(self, status: BatchStatus, progress: BatchProgress) -> None:
        """Another may take the batch at once. If Redis does not hear it, the lease just ends."""
        try:
            self._queue.run(self._scripts.keep(*self._who, 0, status, progress))
        except QueueError as error:
            log.warning("cannot give the lease back: %s", error)

    def end(self, status: BatchStatus, progress: BatchProgress, output_file: str, error_file: str, errors: str) -> None:
        """The one end. Raise LeaseLost, QueueUnavailable."""
        code = self._queue.run(self._scripts.end(*self._who, status, progress, output_file, error_file, errors))
        if code != "ok":
            raise LeaseLost(code)

    @contextlib.contextmanager
    def kept_meanwhile(self, status: BatchStatus, progress: BatchProgress) -> Iterator[None]:
        """Renew it in a thread while something takes long."""
        over = threading.Event()

        def renew() -> None:
            while not over.wait(RENEW_S):
                with contextlib.suppress(QueueError, LeaseLost):  # the next write says so
                    self.keep(status, progress)

        thread = threading.Thread(target=renew, name="lease")
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()


def take(
    queue: SyncQueue, batch_id: str, owner: str, lease_ms: int, epoch_floor: int, stopping: Callable[[], bool]
) -> Taken:
    """Take a batch, waiting until the lease of a runner that is gone has ended. Raise QueueUnavailable.

    `held`: another renews its lease, so it lives, and the batch is in good hands; or we are to stop.
    """
    call = BatchScripts(queue.keys).take(batch_id, owner, lease_ms, epoch_floor)
    deadline = time.monotonic() + 1.5 * lease_ms / 1000
    while True:
        taken = queue.run(call)
        if taken.code != "held" or time.monotonic() > deadline or stopping():
            return taken
        time.sleep(min(max(taken.wait_ms, 10), 200) / 1000)
