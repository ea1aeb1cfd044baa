"""Ask a running server everything that the checks want to know, in one visit."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import redis
from redis.exceptions import MovedError, RedisError, ResponseError

from prelay_queue.client import SyncQueue, translate
from prelay_queue.errors import QueueError
from prelay_queue.scripts import sha
from prelay_queue.server import ServerInfo, inspect, load_scripts
from prelay_queue.settings import QueueSettings

from ..errors import ServerError
from ..redact import redact
from .fleets import Looks, look_twice

#: Round trips that are measured.
PINGS = 20
#: A script that says that it does not write, and does. A server that keeps its flags refuses it.
LIAR = "#!lua flags=no-writes\nreturn redis.call('SET', KEYS[1], '1', 'PX', 1)"
_CONFIG = ("appendfsync", "save")


@dataclass(frozen=True, slots=True)
class Server:
    """What one visit found.

    `info` is what INFO says, `config` what CONFIG GET gives (nothing where it is forbidden), `scripts` why they do not
    run, `moved` where a cluster sends this fleet's keys, `ahead_s` the server's clock less this host's, `trips_ms` the
    times of round trips. No `looks` where it may not be read; `no_looks` says why.
    """

    where: str
    about: ServerInfo
    info: Mapping[str, Any]
    config: Mapping[str, str] = field(default_factory=dict)
    scripts: str = ""
    moved: str = ""
    ahead_s: float = 0.0
    trips_ms: tuple[float, ...] = ()
    looks: Looks | None = None
    no_looks: str = ""


@dataclass(frozen=True, slots=True)
class JobsServer:
    """The server in which RQ keeps who runs which batch."""

    where: str
    about: ServerInfo
    is_cluster: bool


def look_at_jobs_server(url: str) -> JobsServer:
    """Visit it. Raise ServerError when it does not answer."""
    try:
        client = redis.Redis.from_url(url, protocol=2, socket_timeout=5, socket_connect_timeout=5)
    except ValueError as error:
        raise ServerError(f"--batch-redis-url {redact(url)}: {error}") from None
    try:
        return JobsServer(redact(url), inspect(client), bool(int(client.info("cluster").get("cluster_enabled", 0))))
    except RedisError as error:
        raise ServerError(f"--batch-redis-url {redact(url)}: {translate(error)}") from None
    except QueueError as error:
        raise ServerError(f"--batch-redis-url {redact(url)}: {error}") from None
    finally:
        client.close()


def examine(url: str, where: str, fleet: str) -> Server:
    """Visit the server at `url`. `fleet` is the model's fingerprint, whose keys must be reachable.

    Raise ServerError when it does not answer. Leaves nothing behind.
    """
    try:
        queue = SyncQueue(QueueSettings(url=url, fleet=fleet))
    except ValueError as error:
        raise ServerError(f"--redis-url {redact(url)}: {error}") from None
    try:
        return _visit(queue, where)
    except RedisError as error:
        raise ServerError(f"{redact(url)}: {translate(error)}") from None
    except QueueError as error:
        raise ServerError(f"{redact(url)}: {error}") from None
    finally:
        queue.close()


def _visit(queue: SyncQueue, where: str) -> Server:
    client = queue.redis
    about = inspect(client)
    moved = _moved(queue)
    looks, no_looks = _looks(client)
    return Server(
        where,
        about,
        client.info("everything"),
        _config(client),
        "" if moved else _scripts(queue),
        moved,
        _ahead_s(client),
        _trips_ms(client),
        looks,
        no_looks,
    )


def _config(client: redis.Redis) -> dict[str, str]:
    try:
        found: Any = client.config_get(*_CONFIG)
    except ResponseError:  # managed servers forbid it
        return {}
    return {str(name): str(value) for name, value in found.items()}


def _moved(queue: SyncQueue) -> str:
    """Return where a cluster keeps this fleet's keys, "" where that is here."""
    try:
        queue.redis.exists(queue.keys.queued)
    except MovedError as error:
        return f"{error.host}:{error.port}"
    return ""


def _scripts(queue: SyncQueue) -> str:
    """Load all of them, run one by its hash, and see that a flag is kept. Return what went wrong, or ""."""
    try:
        load_scripts(queue)
        queue.redis.evalsha(sha("view"), 1, queue.keys.prefix, "doctor")
    except (QueueError, ResponseError) as error:
        return str(error)
    try:
        queue.redis.eval(LIAR, 1, f"{queue.keys.prefix}doctor")
    except ResponseError:
        return ""
    return "a script with the flag no-writes may write: the server does not keep script flags"


def _looks(client: redis.Redis) -> tuple[Looks | None, str]:
    try:
        return look_twice(client), ""
    except ResponseError as error:  # a user that may run Prelay's commands need not be allowed to SCAN
        return None, str(error)


def _ahead_s(client: redis.Redis) -> float:
    """Return the server's clock less ours, in seconds, from the quickest of some round trips."""
    tries = []
    for _ in range(5):
        before = time.time()
        seconds, micros = client.time()
        after = time.time()
        tries.append((after - before, int(seconds) + int(micros) / 1e6 - (before + after) / 2))
    return min(tries)[1]


def _trips_ms(client: redis.Redis) -> tuple[float, ...]:
    found = []
    for _ in range(PINGS):
        before = time.perf_counter()
        client.ping()
        found.append((time.perf_counter() - before) * 1000)
    return tuple(found)
