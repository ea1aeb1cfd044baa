"""Start a worker process: from its configuration to the model loop."""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Callable

from prelay_queue import logs, statuspage
from prelay_queue.client import SyncQueue
from prelay_queue.errors import QueueError
from prelay_queue.identity import incarnation
from prelay_queue.job import Claim
from prelay_queue.server import inspect, load_scripts

from .backend import Backend
from .config import WorkerConfig
from .errors import StartupError
from .null import null_backend
from .worker import MatcherFactory, Worker
from .writer import Matcher

log = logging.getLogger("prelay.process")

WorkerClass = Callable[[WorkerConfig, Backend, MatcherFactory, str], Worker]


def run_worker(make: WorkerClass, config: WorkerConfig) -> int:
    """Load, serve and end. Return the exit code; what cannot work is one line on stderr and 1."""
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s %(message)s", stream=sys.stderr)
    threading.excepthook = _end_with_thread
    try:
        check_server(config)
        name = incarnation()
        logs.name_process(worker=name)
        worker = make(config, _backend(config, name), _matcher_factory(config), name)
        if config.metrics_port:
            _show(worker, config)
    except (StartupError, QueueError) as error:
        print(f"prelay {config.role}: {error}", file=sys.stderr)
        return 1
    return worker.run()


def _show(worker: Worker, config: WorkerConfig) -> None:
    host, port = config.metrics_host, config.metrics_port
    try:
        statuspage.show(host, port, worker.metrics.recorder.text, worker.leases.problems)
    except OSError as error:
        raise StartupError(f"--metrics-port: cannot listen on {host} port {port}: {error.strerror}") from None


def _end_with_thread(args: threading.ExceptHookArgs) -> None:
    """A worker that has lost one of its threads would hold its jobs for ever: it ends, and its jobs go elsewhere."""
    name = args.thread.name if args.thread else "?"
    log.critical("thread %s failed: the worker ends", name, exc_info=args.exc_value)
    sys.stderr.flush()
    os._exit(1)


def check_server(config: WorkerConfig) -> None:
    """Raise StartupError when the server will not do, QueueError when it does not answer."""
    queue = SyncQueue(config.queue)
    try:
        server = inspect(queue.redis)
        if problems := server.problems():
            raise StartupError("; ".join(problems))
        for warning in server.warnings():
            log.warning("%s", warning)
        load_scripts(queue)
    finally:
        queue.close()


def _backend(config: WorkerConfig, worker: str) -> Backend:
    if config.null is not None:
        return null_backend(config)
    from .real import real_backend  # torch is imported only when there is a model to run

    return real_backend(config, worker)


def _matcher_factory(config: WorkerConfig) -> MatcherFactory:
    if config.model is None:
        return lambda _: None
    from prelay_text.detokenizer import continues_text
    from prelay_text.stops import StopMatcher
    from prelay_text.tokenizer import Tokenizer

    tokenizer = Tokenizer.load(config.model)

    def make(claim: Claim) -> Matcher | None:
        sampling = claim.spec.sampling
        if not sampling.stop:
            return None
        # The job alone decides it, so that worker and API see the same text.
        continues = continues_text(claim.spec.prompt_ids, tokenizer)
        matcher = StopMatcher(
            sampling.stop,
            tokenizer,
            min_tokens=sampling.min_tokens,
            continues=continues,
            skip_special_tokens=sampling.skip_special_tokens,
        )
        for token in claim.ids:
            matcher.push(token)
        return matcher

    return make
