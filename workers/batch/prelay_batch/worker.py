"""The RQ worker that runs batches, and nothing else."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import signal
import threading
from types import FrameType
from typing import Any

from redis.exceptions import RedisError
from rq import Queue, Worker
from rq.exceptions import DeserializationError, StopRequested
from rq.executions import Execution
from rq.job import Job, JobStatus
from rq.utils import now

from prelay_files.ids import is_batch_id
from prelay_queue.batch_jobs import FAILURE_TTL_S, FUNCTION

from .job import stop_on_sigterm

log = logging.getLogger("prelay.batch")

_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None, use_errno=True)


def strange(job: Job) -> str:
    """Why a job is none of ours; '' when it is. Whoever can write to Redis must not be able to choose code."""
    try:
        function, instance, args, kwargs = job.func_name, job.instance, job.args, job.kwargs
    except DeserializationError:
        return "it is not JSON"
    if function != FUNCTION or instance is not None or kwargs:
        return f"it asks for {str(function)[:100]!r}"
    if not (isinstance(args, list) and args == [job.id] and is_batch_id(job.id)):
        return f"it is for {str(args)[:100]!r}, and its own id is {job.id[:100]!r}"
    callbacks = (job._success_callback_name, job._failure_callback_name, job._stopped_callback_name)
    if any(callbacks) or job.webhooks or job.repeats_left or job.dependency_ids:
        return "it asks for something to be done beside it"
    return ""


class BatchWorker(Worker):
    """Each batch runs in a fork, the work horse. It dies with this process, and gives its batch back when this one is
    told to stop; `stop` is set by that.

    RQ's other habits are kept: one job at a time, a heartbeat, a retry when the horse is killed.
    """

    def __init__(self, stop: threading.Event, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._stop = stop

    def _install_signal_handlers(self) -> None:
        super()._install_signal_handlers()  # type: ignore[no-untyped-call]
        if self._stop.is_set():  # before RQ could hear it
            self.teardown()  # type: ignore[no-untyped-call]
            raise StopRequested

    def execute_job(self, job: Job, queue: Queue) -> None:
        why = strange(job)
        if why:
            self._refuse(job, queue, why)
        else:
            super().execute_job(job, queue)

    def _refuse(self, job: Job, queue: Queue, why: str) -> None:
        """Fail a job without anything that it asks for on a failure."""
        log.error("job %s is refused: %s", job.id, why)
        with self.connection.pipeline() as pipe:
            job.set_status(JobStatus.FAILED, pipeline=pipe)
            pipe.expire(job.key, FAILURE_TTL_S)
            pipe.lrem(queue.intermediate_queue_key, 0, job.id)
            pipe.execute()

    def fork_work_horse(self, job: Job, queue: Queue) -> None:
        self._parent = os.getpid()
        super().fork_work_horse(job, queue)

    def main_work_horse(self, job: Job, queue: Queue) -> None:
        _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != self._parent:  # it died before we asked
            os._exit(1)
        super().main_work_horse(job, queue)

    def setup_work_horse_signals(self) -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        stop_on_sigterm()

    def request_stop(self, signum: int, frame: FrameType | None) -> None:
        self._stop.set()
        super().request_stop(signum, frame)  # type: ignore[no-untyped-call]

    def handle_warm_shutdown_request(self) -> None:
        """The horse gives its batch back; RQ would wait for the batch's end."""
        if self.horse_pid:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.horse_pid, signal.SIGTERM)

    def run_maintenance_tasks(self) -> None:
        """What stands in RQ's lists and makes no sense to it must not end this worker again and again."""
        try:
            super().run_maintenance_tasks()  # type: ignore[no-untyped-call]
        except RedisError:
            raise
        except Exception:
            log.exception("RQ stumbled over its own lists")
            self.last_cleaned_at = now()  # type: ignore[assignment]

    def maintain_heartbeats(self, job: Job, execution: Execution) -> None:
        """A Redis that does not answer is no reason to leave the horse alone."""
        with contextlib.suppress(RedisError):
            super().maintain_heartbeats(job, execution)
