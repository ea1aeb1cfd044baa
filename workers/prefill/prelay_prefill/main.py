"""Entry of a prefill worker process."""

from __future__ import annotations

from prelay_worker.config import WorkerConfig
from prelay_worker.process import run_worker

from .worker import PrefillWorker


def run(config: WorkerConfig) -> int:
    """Serve until told to stop; return the exit code."""
    return run_worker(PrefillWorker, config)
