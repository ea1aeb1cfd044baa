"""The API processes that a queue has heard of. Raises QueueError."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from redis.exceptions import RedisError

from .client import SyncQueue, translate


def announce(queue: SyncQueue, api: str) -> None:
    """Say that an API process lives, before it listens."""
    queue.run(queue.scripts.attend(api, queue.settings.times.api_ttl_s, begin=False))


def known(queue: SyncQueue, names: Sequence[str]) -> set[str]:
    """Which of these have been heard of, and not been given up since."""
    try:
        scores: Any = queue.redis.zmscore(queue.keys.apis, list(names))
    except RedisError as error:
        raise translate(error) from None
    return {name for name, score in zip(names, scores, strict=True) if score is not None}
