"""What the Redis at the other end is, and whether it will do."""

from __future__ import annotations

from dataclasses import dataclass

import redis
from redis.exceptions import RedisError

from .client import SyncQueue, translate
from .errors import QueueError
from .scripts import NAMES, sha, source
from .settings import MINIMUM_REDIS, MINIMUM_VALKEY

#: Share of maxmemory from which on a server takes no new work: what runs needs the rest to drain.
NEARLY_FULL = 0.8


def nearly_full(used: int, maxmemory: int) -> bool:
    """Whether so many bytes are too many; 0 of maxmemory is no limit."""
    return maxmemory > 0 and used > maxmemory * NEARLY_FULL


@dataclass(frozen=True, slots=True)
class ServerInfo:
    """What INFO says, as far as it matters here. Memory in bytes, 0 is no limit."""

    kind: str  # redis | valkey
    version: str
    role: str
    policy: str
    used_memory: int
    maxmemory: int
    aof: bool
    loading: bool

    def problems(self) -> list[str]:
        """Return what makes this server unfit, a line each."""
        found = []
        minimum = MINIMUM_VALKEY if self.kind == "valkey" else MINIMUM_REDIS
        if version_tuple(self.version)[: len(minimum)] < minimum:
            found.append(
                f"server version: {self.kind} {self.version} is too old, at least"
                f" {'.'.join(map(str, minimum))} is needed"
            )
        if self.role != "master":
            found.append(f"role: the server is a {self.role}; Prelay writes and needs the master")
        return found

    def warnings(self) -> list[str]:
        """Return what will hurt later, a line each."""
        found = []
        if self.policy != "noeviction":
            found.append(
                f"maxmemory-policy is {self.policy}: under memory pressure the server will delete jobs;"
                " set it to noeviction"
            )
        if not self.aof:
            found.append("appendonly is off: a restart of the server loses the queue")
        return found


def version_tuple(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".") if part.isdigit())


def inspect(client: redis.Redis) -> ServerInfo:
    """Ask the server what it is. Raise QueueUnavailable or QueueError."""
    try:
        info = client.info()
    except RedisError as error:
        raise translate(error) from None
    valkey = info.get("server_name") == "valkey"
    return ServerInfo(
        kind="valkey" if valkey else "redis",
        version=str(info["valkey_version"] if valkey else info["redis_version"]),
        role=str(info["role"]),
        policy=str(info.get("maxmemory_policy", "noeviction")),
        used_memory=int(info["used_memory"]),
        maxmemory=int(info.get("maxmemory", 0)),
        aof=bool(int(info.get("aof_enabled", 0))),
        loading=bool(int(info.get("loading", 0))),
    )


def load_scripts(queue: SyncQueue) -> None:
    """Load every script, so that a server that cannot run them says so now. Raise QueueError."""
    try:
        known = queue.redis.script_exists(*(sha(name) for name in NAMES))
        with queue.redis.pipeline(transaction=False) as pipe:
            for name, is_known in zip(NAMES, known, strict=True):
                if not is_known:
                    pipe.script_load(source(name))
            pipe.execute()
    except RedisError as error:
        raise QueueError(f"the server cannot run our scripts: {error}") from None
