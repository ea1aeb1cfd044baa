"""How a process talks to Redis, and the times of the protocol."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

#: Oldest servers with script flags and all commands used here.
MINIMUM_REDIS = (7, 0)
MINIMUM_VALKEY = (7, 2)


@dataclass(frozen=True, slots=True)
class QueueTimes:
    """Times of the queue protocol, in milliseconds unless the name says otherwise."""

    lease_ms: int = 10_000
    renew_ms: int = 3_000
    heartbeat_ms: int = 1_000
    worker_ttl_ms: int = 15_000
    #: A worker whose model loop has not stamped progress for this long renews nothing.
    stall_ms: int = 20_000
    #: A delivered entry that nobody claimed is taken over after this long.
    pending_idle_ms: int = 5_000
    #: A preempt that no relay answered is re-queued by a sweep after this long.
    preempt_grace_ms: int = 2_000
    #: A queued job's stream entry is checked this often.
    queued_check_ms: int = 1_500
    #: A prefilled job that no live decode worker can take goes back to step 1 after this long, if others can run it.
    stranded_ms: int = 30_000
    sweep_ms: int = 1_000
    #: Everybody looks this often for jobs that are past their deadline.
    deadline_check_ms: int = 250
    #: The live stream of an API process that is not heard of goes after this long, seconds.
    api_ttl_s: int = 30
    #: An API process that is not heard of for this long watches nothing any more.
    api_grace_ms: int = 30_000


@dataclass(frozen=True, slots=True)
class QueueSettings:
    """Where the queue is. `url` is redis://, rediss:// or unix://."""

    url: str
    fleet: str
    partition: int = 0
    times: QueueTimes = field(default_factory=QueueTimes)
    max_connections: int = 16
    #: How many jobs, and how many tokens of their prompts, may wait of a class when new ones come; absent or 0: any.
    max_queued_jobs: Mapping[str, int] = field(default_factory=dict)
    max_queued_tokens: Mapping[str, int] = field(default_factory=dict)
