"""Entry of a batch worker."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import threading
import time
from functools import partial

import redis
from redis.exceptions import RedisError
from rq.exceptions import StopRequested
from rq.serializers import JSONSerializer

from prelay_files.errors import FilesError
from prelay_files.store import check_root
from prelay_files.users import check_queue
from prelay_queue.apis import known
from prelay_queue.batch_jobs import queue_name
from prelay_queue.client import SyncQueue
from prelay_queue.errors import QueueError
from prelay_queue.identity import incarnation
from prelay_queue.niceness import stand_back
from prelay_queue.server import inspect, load_scripts
from prelay_text.errors import TextError
from prelay_text.fingerprint import fingerprint
from prelay_text.tokenizer import Tokenizer

from .config import BatchConfig
from .errors import StartupError
from .job import Ready, prepare
from .status import show
from .worker import BatchWorker

log = logging.getLogger("prelay.batch")

#: By how much this process and its forks stand back for others on the machine: those serve online requests, too.
NICE = 10
#: Lost jobs of RQ are looked for this often, seconds.
MAINTENANCE_S = 30
#: And a work horse, seconds.
MONITORING_S = 5
#: After an error of RQ's its worker begins anew so much later, seconds.
PAUSE_S = 1.0


def run(config: BatchConfig) -> int:
    """Run batches until told to stop; return the exit code. What cannot work is one line on stderr and 1."""
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s %(message)s", stream=sys.stderr)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # forks follow; and what is idle is left to others
    stand_back(NICE)
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    try:
        _check(config)
        tokenizer = Tokenizer.load(config.model)
        if config.metrics_port:
            show(config)
    except (StartupError, QueueError, TextError, FilesError) as error:
        print(f"prelay batch-worker: {error}", file=sys.stderr)
        return 1
    prepare(Ready(config, tokenizer, f"fp_{fingerprint(config.model)}"))
    log.info("batch worker %d is ready", os.getpid())
    while not stop.is_set():
        _work(config, stop)
    return 0


def _work(config: BatchConfig, stop: threading.Event) -> None:
    """One life of an RQ worker: until it is told to stop, or gives up because of an error."""
    connection = redis.Redis.from_url(config.jobs_url or config.queue.url, protocol=2)
    worker: BatchWorker | None = None
    try:
        worker = BatchWorker(
            stop,
            [queue_name(config.queue.fleet)],
            name=incarnation(),
            connection=connection,
            serializer=JSONSerializer,
            default_result_ttl=0,
            maintenance_interval=MAINTENANCE_S,
            job_monitoring_interval=MONITORING_S,
            log_job_description=False,
        )
        worker.work(logging_level="WARNING")
    except StopRequested:
        pass
    except RedisError as error:
        log.warning("Redis does not answer: %s", error)
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: stop.set())
        connection.close()
    if worker is not None:
        _see_off(worker.horse_pid, stop)
    stop.wait(PAUSE_S)


def _see_off(horse: int, stop: threading.Event) -> None:
    """Wait for a work horse that its RQ worker has left alone."""
    told = False
    while horse:
        if stop.is_set() and not told:
            told = True
            with contextlib.suppress(ProcessLookupError):
                os.kill(horse, signal.SIGTERM)
        with contextlib.suppress(ChildProcessError):
            if os.waitpid(horse, os.WNOHANG) == (0, 0):
                time.sleep(0.1)
                continue
        return


def _check(config: BatchConfig) -> None:
    """Raise StartupError when the server will not do, QueueError when it does not answer."""
    if config.queue.fleet == "":
        raise StartupError("fleet must not be empty")
    check_root(config.files_dir)
    queue = SyncQueue(config.queue)
    try:
        server = inspect(queue.redis)
        if problems := server.problems():
            raise StartupError("; ".join(problems))
        load_scripts(queue)
        check_queue(config.files_dir, partial(known, queue))
    finally:
        queue.close()
