"""Entry of a unified worker process."""

from __future__ import annotations

from prelay_worker.config import WorkerConfig
from prelay_worker.process import run_worker

from .worker import UnifiedWorker


def run(config: WorkerConfig) -> int:
    """Serve until told to stop; return the exit code."""
    return run_worker(UnifiedWorker, config)
