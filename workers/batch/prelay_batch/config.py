"""What a batch worker is told at its start."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from prelay_queue.settings import QueueSettings


@dataclass(frozen=True, slots=True)
class BatchConfig:
    """One batch worker. `model` is a local folder, of which only the tokenizer is read.

    `jobs_url` is the Redis in which RQ keeps who runs which batch; empty: the queue's own.
    """

    queue: QueueSettings
    jobs_url: str
    model: Path
    served_model_name: str
    files_dir: Path
    #: Jobs that a runner has in the queue at the same time.
    window: int = 512
    #: Lines that are read ahead, so that those which share a prefix run together.
    lookahead: int = 4096
    #: Runs of a line that may fail by a fault of the server's.
    max_tries: int = 3
    #: A runner that is not heard of for so long has lost its batch, ms.
    lease_ms: int = 10_000
    #: Metrics and health are shown on this port; 0: nowhere.
    metrics_port: int = 0
    metrics_host: str = "127.0.0.1"
