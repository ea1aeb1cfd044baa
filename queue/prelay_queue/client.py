"""Connections to Redis, configured so that a retry can neither double nor strand anything.

The command pool retries, because every script is idempotent. Blocking readers get a connection of their own that
never retries: after any error they look at what they may have missed (their pending entries, the log) instead.
redis-py's defaults do neither (they repeat an XADD on a cut connection and strand entries in the PEL).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, TypeVar

import redis
import redis.asyncio as aredis
from redis.asyncio.retry import Retry as AsyncRetry
from redis.backoff import ExponentialBackoff
from redis.exceptions import (
    BusyLoadingError,
    ClusterDownError,
    NoScriptError,
    OutOfMemoryError,
    ReadOnlyError,
    RedisError,
    ResponseError,
    TryAgainError,
)
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError
from redis.retry import Retry

from . import failpoints
from .errors import QueueError, QueueFull, QueueUnavailable
from .keys import Keys
from .pool import FairPool
from .recorder import NOBODY, Recorder
from .scripts import Call, Scripts, sha, source
from .settings import QueueSettings

R = TypeVar("R")

#: Replies that mean "not now". The driver takes the code off the words of those that it has a class for (MASTERDOWN
#: is a ClusterDownError to it).
_UNAVAILABLE = (
    RedisConnectionError,
    RedisTimeoutError,
    BusyLoadingError,
    ReadOnlyError,
    ClusterDownError,
    TryAgainError,
)
#: And those that it has none for. MISCONF: the disk is full and nothing can be persisted.
_TRANSIENT_PREFIXES = ("NOREPLICAS", "UNBLOCKED", "MISCONF", "BUSY ")


def translate(error: Exception) -> QueueError:
    """Turn a driver's exception into one of ours."""
    words = str(error)
    if isinstance(error, OutOfMemoryError) or words.startswith("OOM"):
        return QueueFull("Redis is over its memory limit (maxmemory) and takes no new work")
    if isinstance(error, _UNAVAILABLE) or words.startswith(_TRANSIENT_PREFIXES):
        return QueueUnavailable(f"Redis does not answer: {words or type(error).__name__}")
    return QueueError(words or type(error).__name__)


def _counted(recorder: Recorder, error: QueueError) -> QueueError:
    kinds = {QueueUnavailable: "unavailable", QueueFull: "full"}
    recorder.inc("prelay_redis_errors_total", kinds.get(type(error), "refused"))
    return error


def _evalsha(call: Call[Any]) -> tuple[Any, ...]:
    return ("EVALSHA", sha(call.name), 1, call.prefix, *call.args)


def _eval(call: Call[Any]) -> tuple[Any, ...]:
    """For a server that lost its scripts: it runs this one and keeps it, with no gap for another flush."""
    return ("EVAL", source(call.name), 1, call.prefix, *call.args)


def _decoded(call: Call[Any], answer: Any, recorder: Recorder) -> Any:
    """The answer to one call of several; what was refused of it as the error."""
    if isinstance(answer, Exception):
        return _counted(recorder, translate(answer))
    try:
        return call.decode(answer)
    except QueueError as error:  # refused by the script itself
        return error


#: RESP2: redis-py's RESP3 turns its own check for dirty connections off. The driver's name and version are looked up
#: once: it would read its own package's metadata again for each connection.
_COMMON: dict[str, Any] = {
    "protocol": 2,
    "decode_responses": False,
    "socket_connect_timeout": 2,
    "driver_info": redis.DriverInfo(),
}


class SyncQueue:
    """One process's queue connections for threads. Safe to share between threads."""

    def __init__(self, settings: QueueSettings, recorder: Recorder = NOBODY) -> None:
        self.settings = settings
        self._recorder = recorder
        self.keys = Keys(settings.fleet, settings.partition)
        self.scripts = Scripts(self.keys, settings.max_queued_jobs, settings.max_queued_tokens)
        pool = redis.BlockingConnectionPool.from_url(
            settings.url,
            max_connections=settings.max_connections,
            timeout=2,
            socket_timeout=2,
            retry=Retry(ExponentialBackoff(cap=0.5, base=0.05), 2),
            **_COMMON,
        )
        self.redis = redis.Redis(connection_pool=pool)
        self._readers: list[redis.Redis] = []

    def reader(self) -> redis.Redis:
        """Return a client with one connection of its own for blocking reads of up to 1 s; it never retries."""
        pool = redis.ConnectionPool.from_url(
            self.settings.url, max_connections=1, socket_timeout=5, retry=Retry(ExponentialBackoff(), 0),
            **_COMMON,
        )  # fmt: skip
        client = redis.Redis(connection_pool=pool)
        self._readers.append(client)
        return client

    def run(self, call: Call[R]) -> R:
        """Send one script call. Raise QueueFull, QueueUnavailable or QueueError."""
        failpoints.hit(f"{call.name}.before")
        began = time.perf_counter()
        try:
            answer = self._send(call)
            if failpoints.loses_reply(call.name):
                answer = self._send(call)
        except RedisError as error:
            raise _counted(self._recorder, translate(error)) from None
        self._recorder.observe("prelay_redis_command_seconds", time.perf_counter() - began, call.name)
        failpoints.hit(f"{call.name}.after")
        return call.decode(answer)

    def _send(self, call: Call[Any]) -> Any:
        try:
            return self.redis.execute_command(*_evalsha(call))
        except NoScriptError:
            return self.redis.execute_command(*_eval(call))

    def run_many(self, calls: Sequence[Call[Any]]) -> list[Any]:
        """Send calls in order in one round trip; one answer per call.

        What Redis refuses of one call is returned in its place, as the QueueError that `run` would raise. Raised is
        only QueueUnavailable or another error of the connection: then nobody knows how many ran. After a
        QueueUnavailable, raised or returned, send all of them again.
        """
        if len(calls) == 1 or failpoints.armed():
            return [self._answer(call) for call in calls]
        began = time.perf_counter()
        try:
            answers = self._pipeline(calls)
        except RedisError as error:
            raise _counted(self._recorder, translate(error)) from None
        self._recorder.observe("prelay_redis_command_seconds", time.perf_counter() - began, "pipeline")
        return answers

    def _answer(self, call: Call[Any]) -> Any:
        """One call of several, with its failpoints. What makes the rest pointless is raised."""
        try:
            return self.run(call)
        except QueueUnavailable:
            raise
        except QueueError as error:
            return error

    def _pipeline(self, calls: Sequence[Call[Any]]) -> list[Any]:
        answers = self._pipeline_once([_evalsha(call) for call in calls])
        if any(isinstance(answer, NoScriptError) for answer in answers):
            # Scripts are idempotent, so the whole batch is simply sent again, in order.
            answers = self._pipeline_once([_eval(call) for call in calls])
        return [_decoded(call, answer, self._recorder) for call, answer in zip(calls, answers, strict=True)]

    def _pipeline_once(self, commands: Sequence[tuple[Any, ...]]) -> list[Any]:
        with self.redis.pipeline(transaction=False) as pipe:
            for command in commands:
                pipe.execute_command(*command)
            return pipe.execute(raise_on_error=False)

    def close(self) -> None:
        for client in (*self._readers, self.redis):
            client.connection_pool.disconnect()


class AsyncQueue:
    """One process's queue connections for asyncio. A cancelled `run` leaves a complete call or none."""

    def __init__(self, settings: QueueSettings, recorder: Recorder = NOBODY) -> None:
        self.settings = settings
        self._recorder = recorder
        self.keys = Keys(settings.fleet, settings.partition)
        self.scripts = Scripts(self.keys, settings.max_queued_jobs, settings.max_queued_tokens)
        pool = FairPool.from_url(
            settings.url,
            max_connections=settings.max_connections // 2,
            patience_s=2.0,
            socket_timeout=2,
            retry=AsyncRetry(ExponentialBackoff(cap=0.5, base=0.05), 2),
            **_COMMON,
        )
        self.redis = aredis.Redis(connection_pool=pool)
        self._readers: list[aredis.Redis] = []

    def reader(self) -> aredis.Redis:
        """Return a client with one connection of its own for blocking reads of up to 1 s; it never retries."""
        pool = aredis.ConnectionPool.from_url(
            self.settings.url, max_connections=1, socket_timeout=5, retry=AsyncRetry(ExponentialBackoff(), 0),
            **_COMMON,
        )  # fmt: skip
        client = aredis.Redis(connection_pool=pool)
        self._readers.append(client)
        return client

    async def run(self, call: Call[R]) -> R:
        """Send one script call. Raise QueueFull, QueueUnavailable or QueueError."""
        await failpoints.ahit(f"{call.name}.before")
        began = time.perf_counter()
        try:
            answer = await self._send(call)
            if failpoints.loses_reply(call.name):
                answer = await self._send(call)
        except RedisError as error:
            raise _counted(self._recorder, translate(error)) from None
        self._recorder.observe("prelay_redis_command_seconds", time.perf_counter() - began, call.name)
        await failpoints.ahit(f"{call.name}.after")
        return call.decode(answer)

    async def _send(self, call: Call[Any]) -> Any:
        try:
            return await self.redis.execute_command(*_evalsha(call))
        except NoScriptError:
            return await self.redis.execute_command(*_eval(call))

    async def run_many(self, calls: Sequence[Call[R]]) -> list[R]:
        """Send calls in order in one round trip; raise what `run` would for the first that fails, after all."""
        if len(calls) == 1 or failpoints.armed():
            return [await self.run(call) for call in calls]
        began = time.perf_counter()
        try:
            answers = await self._pipeline_once([_evalsha(call) for call in calls])
            if any(isinstance(answer, NoScriptError) for answer in answers):
                # Scripts are idempotent, so the whole batch is simply sent again, in order.
                answers = await self._pipeline_once([_eval(call) for call in calls])
        except RedisError as error:
            raise _counted(self._recorder, translate(error)) from None
        self._recorder.observe("prelay_redis_command_seconds", time.perf_counter() - began, "pipeline")
        found = [_decoded(call, answer, self._recorder) for call, answer in zip(calls, answers, strict=True)]
        for answer in found:
            if isinstance(answer, QueueError):
                raise answer
        return found

    async def _pipeline_once(self, commands: Sequence[tuple[Any, ...]]) -> list[Any]:
        async with self.redis.pipeline(transaction=False) as pipe:
            for command in commands:
                pipe.execute_command(*command)
            return await pipe.execute(raise_on_error=False)

    async def aclose(self) -> None:
        for client in (*self._readers, self.redis):
            await client.aclose()
            await client.connection_pool.disconnect()


def is_missing_group(error: ResponseError) -> bool:
    """True when a stream or its group vanished under a reader (7.0 says UNBLOCKED, later servers NOGROUP)."""
    return str(error).startswith(("NOGROUP", "UNBLOCKED"))
