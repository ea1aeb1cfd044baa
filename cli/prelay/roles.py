"""The single-process commands: from settings to the configuration of one process."""

from __future__ import annotations

import os
from pathlib import Path

from prelay_queue import logs
from prelay_queue.niceness import stand_back
from prelay_queue.settings import QueueSettings
from prelay_text.errors import TextError
from prelay_text.fingerprint import fingerprint

from .apikeys import api_keys
from .classes import QUEUED_JOBS, QUEUED_TOKENS, per_class
from .device import check_device
from .errors import BadUsage, ModelUnavailable
from .geometry import Geometry, check_folder, read_geometry
from .host import this_host
from .model import resolve_with_progress, served_name
from .settings import Settings
from .sizing import sizes

#: Read by the thread pools of torch, oneDNN and numpy when they are loaded.
THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


def run_api(settings: Settings) -> int:
    """Run one API process. Return its exit code."""
    keys = api_keys(settings)
    folder = resolve_with_progress(settings.model)
    queue = queue_settings(settings, folder)
    _set_up(settings, threads=1)
    from prelay_api.config import ApiConfig
    from prelay_api.main import run

    return run(
        ApiConfig(
            queue=queue,
            model=folder,
            served_model_name=settings.served_model_name or served_name(settings.model, folder),
            host=settings.host,
            port=settings.port,
            keep=settings.keep,
            shutdown_grace_s=settings.shutdown_grace_s,
            drain_s=settings.drain_s,
            share_port=settings.share_port,
            body_timeout_s=settings.body_timeout_s,
            api_keys=keys,
            files_dir=files_folder(settings, queue),
            jobs_url=settings.jobs_url or queue.url,
        )
    )


def run_batch_worker(settings: Settings) -> int:
    """Run one batch worker. Return its exit code."""
    if settings.files_dir is None:
        raise BadUsage("--files-dir is needed: the folder in which the API processes keep files and batches")
    folder = resolve_with_progress(settings.model)
    queue = queue_settings(settings, folder)
    files = files_folder(settings, queue)
    assert files is not None
    _set_up(settings, threads=1)
    from prelay_batch.config import BatchConfig
    from prelay_batch.main import run

    return run(
        BatchConfig(
            queue=queue,
            jobs_url=settings.jobs_url or queue.url,
            model=folder,
            served_model_name=settings.served_model_name or served_name(settings.model, folder),
            files_dir=files,
            metrics_port=settings.metrics_port,
            metrics_host=settings.metrics_host,
        )
    )


def run_worker(role: str, settings: Settings) -> int:
    """Run one worker of `role` (prefill, decode or unified). Return its exit code."""
    check_device(settings)
    folder = resolve_with_progress(settings.model)
    queue = queue_settings(settings, folder)
    # Shares of this machine are for this command's one worker.
    alone = settings.model_copy(update={"prefill": 0, "decode": 0, "unified": 0} | {role: 1})
    mine = sizes(alone, geometry(settings, folder), this_host())
    _set_up(settings, mine.threads)
    if role == "decode":
        stand_back(settings.decode_nice or 0)  # before there are threads, which would keep what they have
    from prelay_worker.config import NullModel, Role, WorkerConfig

    from .cards import gpu_config

    null = NullModel(
        vocab_size=settings.null_vocab,
        divergent=settings.null_divergent,
        step_ms=settings.null_step_ms,
        prefill_ms_per_token=settings.null_prefill_ms,
    )
    config = WorkerConfig(
        role=Role(role),
        queue=queue,
        model=folder,
        kv_blocks=mine.prefill_kv_blocks if role == "prefill" else mine.kv_blocks,
        block_size=settings.block_size,
        dtype=settings.dtype,
        kernels=settings.kernels,
        quantization=settings.quantization,
        max_running=settings.running,
        prefill_chunk=settings.chunk,
        batch_step_ms=settings.batch_step_ms,
        max_model_len=settings.max_model_len,
        threads=mine.threads,
        max_preemptions=settings.max_preemptions,
        prefix_cache=settings.prefix_cache == "on",
        local_prefill_tokens=settings.local_prefill_tokens,
        patience_s=settings.patience_s,
        metrics_port=settings.metrics_port,
        metrics_host=settings.metrics_host,
        null=null if settings.null_model else None,
        gpu=gpu_config(settings),
        kv_transport=settings.kv_transport,
    )
    return _entry(role, config)


def _entry(role: str, config: object) -> int:
    if role == "prefill":
        from prelay_prefill.main import run
    elif role == "decode":
        from prelay_decode.main import run
    else:
        from prelay_unified.main import run
    return run(config)  # type: ignore[arg-type]


def files_folder(settings: Settings, queue: QueueSettings) -> Path | None:
    """Return where this model's files and batches are, None where there are none.

    What was asked of another model cannot be answered by this one: it waits in a folder of its own.
    """
    return settings.files_dir.absolute() / queue.fleet if settings.files_dir else None


def queue_settings(settings: Settings, folder: Path) -> QueueSettings:
    """Return where the queue is and which fleet's keys to use. Raise BadUsage, ModelUnavailable."""
    if settings.url is None:
        raise BadUsage("--redis-url is needed: only prelay serve brings a server of its own")
    try:
        return QueueSettings(
            url=settings.url,
            fleet=fingerprint(folder),
            max_queued_jobs=per_class(settings.max_queued_jobs, QUEUED_JOBS),
            max_queued_tokens=per_class(settings.max_queued_tokens, QUEUED_TOKENS),
        )
    except TextError as error:
        raise ModelUnavailable(str(error)) from None


def geometry(settings: Settings, folder: Path) -> Geometry | None:
    """Return what the model's KV costs, None for the null model. Raise ModelUnavailable."""
    check_folder(folder, with_weights=not settings.null_model)
    return None if settings.null_model else read_geometry(folder)


def thread_variables(threads: int) -> dict[str, str]:
    """Return the variables that set a process's thread pools; set before torch is imported."""
    # OpenBLAS serves only numpy, which has nothing heavy to do, and starts its threads at import: a fork could not
    # be taken of such a process (see nursery_process.py).
    one = {"OPENBLAS_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    return dict.fromkeys(THREAD_VARIABLES, str(threads)) | one


def _set_up(settings: Settings, threads: int) -> None:
    os.environ.update(thread_variables(threads))
    logs.set_up(settings.log_level, settings.log_format)
