"""Errors of a worker.

WorkerError
├── HandoverFailed        the KV of a staged job could not be taken over
│   ├── HandoverStale     … because it is gone or was overwritten: start the job again at step 1
│   ├── HandoverBroken    … because it can never fit here (layout, corrupt reference): end the job
│   ├── HandoverBlocked   … because this worker cannot reach it, though others may: start the job again at step 1
│   └── DeviceBroken      … because this process's GPU context is: end the worker, and start all its jobs again
└── StartupError          the worker cannot start; the message says what to do
"""

from __future__ import annotations


class WorkerError(Exception):
    """A worker could not do its work."""


class HandoverFailed(WorkerError):  # noqa: N818 - reads as the fact it states
    """The KV of a staged job could not be taken over."""


class HandoverStale(HandoverFailed):
    """The KV is gone or was overwritten."""


class HandoverBroken(HandoverFailed):
    """The KV reference is corrupt or its layout differs."""


class HandoverBlocked(HandoverFailed):
    """This worker could not open or copy memory that may be there and whole; no job is to blame."""


class DeviceBroken(HandoverFailed):
    """Whatever this process asks of its GPU from now on fails."""


class StartupError(WorkerError):
    """The worker cannot start."""
