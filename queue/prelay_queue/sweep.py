"""The sweeps that any process may run: what `reap` and `expire` are asked for, and what they found, in words."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import orjson

from .recorder import Recorder
from .scripts import Call, Reaped, Scripts
from .settings import QueueTimes

log = logging.getLogger("prelay.sweep")

#: Jobs of one kind given back in one sweep.
LIMIT = 100
#: Crashes while alone after which a job is given up.
MAX_ALONE_CRASHES = 2
#: What the client of such a job is told.
CRASHED_ALONE = orjson.dumps(
    {
        "message": "the request was given up: the worker process ended each time while running it",
        "type": "server_error",
        "code": "worker_crashed",
        "param": None,
        "status": 500,
    }
).decode()


def sweep(scripts: Scripts, times: QueueTimes, server_ms: int) -> Call[Reaped]:
    """The call. Send it only after one lease of uninterrupted contact: an outage must not expire the world.

    `server_ms` is what the server's clock shows now. A call that is held up on its way, perhaps with everybody's
    renewals behind it, does nothing.
    """
    latest_ms = server_ms + times.lease_ms // 4
    grace_ms, check_ms = times.preempt_grace_ms, times.queued_check_ms
    return scripts.reap(LIMIT, grace_ms, check_ms, MAX_ALONE_CRASHES, CRASHED_ALONE, latest_ms, times.api_grace_ms)


def expire(scripts: Scripts) -> Call[tuple[str, ...]]:
    """The call that ends what is past its deadline. It may be sent at any time."""
    return scripts.expire(LIMIT)


def say_expired(ended: Sequence[str], recorder: Recorder) -> None:
    """Log and count what was ended."""
    if ended:
        recorder.inc("prelay_swept_jobs_total", "expired", by=len(ended))
        log.info("past their deadline: %s", ", ".join(ended))


def say(swept: Reaped, recorder: Recorder) -> None:
    """Log and count what was given back."""
    for what in ("reaped", "requeued", "pushed", "dead", "abandoned"):
        if ids := getattr(swept, what):
            recorder.inc("prelay_swept_jobs_total", what, by=len(ids))
            log.warning("sweep: %s %s", what, ", ".join(ids))
