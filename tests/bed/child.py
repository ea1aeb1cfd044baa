"""One null worker, or API, as a process: its configuration is one JSON argument. Imports no more than it needs.

python -m tests.bed.child worker '{"role": "decode", …}'
"""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import logging
import os
import signal
import sys
from collections.abc import Sequence
from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson

from prelay_engine.config import GpuConfig
from prelay_queue import failpoints
from prelay_queue.settings import QueueSettings, QueueTimes
from prelay_worker.config import NullModel, Role, WorkerConfig

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

_PR_SET_PDEATHSIG = 1


def encode(config: DataclassInstance) -> str:
    return orjson.dumps(asdict(config), default=str).decode()


def _queue(data: dict[str, Any]) -> QueueSettings:
    return QueueSettings(**{**data, "times": QueueTimes(**data["times"])})


def decode(raw: str) -> WorkerConfig:
    data: dict[str, Any] = orjson.loads(raw)
    queue, null, model, gpu = (data.pop(name) for name in ("queue", "null", "model", "gpu"))
    return WorkerConfig(
        **{**data, "role": Role(data["role"])},
        queue=_queue(queue),
        null=NullModel(**{**null, "eos_ids": tuple(null["eos_ids"])}) if null else None,
        model=Path(model) if model else None,
        gpu=GpuConfig(**gpu) if gpu else None,
    )


def serve(raw: str) -> int:
    config = decode(raw)
    return int(import_module(f"prelay_{config.role}.main").run(config))


def serve_api(raw: str) -> int:
    from prelay_api.config import ApiConfig
    from prelay_api.main import run

    data: dict[str, Any] = orjson.loads(raw)
    folders = {name: Path(data[name]) for name in ("model", "files_dir") if data[name]}
    return run(ApiConfig(**{**data, **folders, "queue": _queue(data["queue"])}))


def serve_batches(raw: str) -> int:
    from prelay_batch.config import BatchConfig
    from prelay_batch.main import run

    data: dict[str, Any] = orjson.loads(raw)
    folders = {name: Path(data[name]) for name in ("model", "files_dir")}
    return run(BatchConfig(**{**data, **folders, "queue": _queue(data["queue"])}))


def serve_forked(raw: str, faults: str, log: str, kind: str = "worker") -> None:
    """Serve in a child of a fork server, which has imported everything: a worker then starts in milliseconds."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    gc.freeze()  # the collector would write to, and so copy, every page that is shared with the fork server
    fd = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    faulthandler.register(signal.SIGUSR1)
    failpoints.arm(faults)
    code = 1
    try:
        code = {"api": serve_api, "batch": serve_batches, "worker": serve}[kind](raw)
    finally:
        logging.shutdown()
        sys.stderr.flush()
        os._exit(code)  # as the end of a process; the fork server's own clean-up is not ours


def serve_nursed(argv: Sequence[str]) -> int:
    """Serve in a fork of the nursery: its role, the configuration, and the faults."""
    _, raw, faults = argv
    faulthandler.register(signal.SIGUSR1)
    failpoints.arm(faults)
    return serve(raw)


if __name__ == "__main__":
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    sys.exit({"api": serve_api, "worker": serve}[sys.argv[1]](sys.argv[2]))
