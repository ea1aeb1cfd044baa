"""How soon a job ends and its KV is free everywhere, with null workers and the product's own times.

    python -m benchmarks.endings --runs 20

deadline            from the deadline of a stream to the moment at which no worker holds a block
disconnect          from the close of a stream's connection by its client, likewise
disconnect, whole   the same for an answer in one piece
delete              from the answer to DELETE /v1/streams/{id}, likewise

In the middle of an answer that runs in decode; p50 and max. Heartbeats come every 50 ms here, so that they tell it soon
enough; with the product's own (1 s) an operator sees it up to a second later. Run from the repository's root.
"""

from __future__ import annotations

import argparse
import json
import socket
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import orjson

from prelay_queue.client import SyncQueue
from prelay_queue.scripts import text
from prelay_queue.settings import QueueTimes
from prelay_worker.config import NullModel, Role
from tests.bed.http import request
from tests.bed.mute import ask
from tests.bed.pools import is_whole
from tests.bed.processes import Api, fleet, until, until_ready
from tests.bed.servers import running
from tests.bed.tokenizer import make_tokenizer

DEADLINE_S = 1


class Pools:
    """What the workers say that they hold."""

    def __init__(self, queue: SyncQueue) -> None:
        self._queue = queue
        self._names = queue.redis.keys(queue.keys.worker("*"))

    def _all(self) -> list[dict[str, int]]:
        return [orjson.loads(raw)["kv"] for raw in self._queue.redis.mget(self._names) if raw]

    def taken(self) -> bool:
        return not all(map(is_whole, self._all()))

    def free(self) -> bool:
        return not self.taken()


def ask_of(api: Api, *, stream: bool, **more: Any) -> socket.socket:
    """Send a request of which nobody will read the answer."""
    body = {"model": "null", "prompt": [1, 2], "max_tokens": 3000, "stream": stream, **more}
    return ask(api.url, "/v1/completions", body)


class Endings:
    """One job after the other, each ended in some way in the middle of its decode. Each way gives milliseconds."""

    def __init__(self, api: Api, queue: SyncQueue) -> None:
        self._api = api
        self._queue = queue
        self._pools = Pools(queue)

    def _until_decode(self) -> str:
        """Wait for the one job that runs, and return its name."""
        leases, job = self._queue.keys.leases, self._queue.keys.job

        def found() -> str:
            names = [text(name) for name in self._queue.redis.zrange(leases, 0, -1)]
            return next((name for name in names if self._queue.redis.hget(job(name), "st") == b"decode"), "")

        return str(until(found, every_s=0.002))

    def _until_free(self, since: float) -> float:
        until(self._pools.free, 30, every_s=0.002)
        return 1000 * (time.monotonic() - since)

    def deadline(self) -> float:
        begun = time.monotonic()
        with ask_of(self._api, stream=True, deadline_ms=1000 * DEADLINE_S):
            self._until_decode()
            until(self._pools.taken)
            return self._until_free(begun + DEADLINE_S)

    def disconnect(self, *, stream: bool = True) -> float:
        with ask_of(self._api, stream=stream):
            self._until_decode()
            until(self._pools.taken)
        return self._until_free(time.monotonic())

    def delete(self) -> float:
        with ask_of(self._api, stream=True):
            name = self._until_decode()
            until(self._pools.taken)
            assert request("DELETE", f"{self._api.url}/v1/streams/{name.partition('/')[0]}").status_code == 200
            return self._until_free(time.monotonic())


def told(kind: str, times: list[float]) -> dict[str, Any]:
    return {"ending": kind, "count": len(times), "p50_ms": round(statistics.median(times)), "max_ms": round(max(times))}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=20)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = make_tokenizer(Path(folder) / "model")
        for server in running("redis"):
            with fleet(server.settings(times=QueueTimes(heartbeat_ms=50)), model) as found:
                api = found.api()
                for role in (Role.PREFILL, Role.DECODE):
                    found.worker(role, null=NullModel(step_ms=20))
                until_ready(api.url)
                queue = SyncQueue(found.queue)
                endings = Endings(api, queue)
                ways: dict[str, Callable[[], float]] = {
                    "deadline": endings.deadline,
                    "disconnect": endings.disconnect,
                    "disconnect, whole": partial(endings.disconnect, stream=False),
                    "delete": endings.delete,
                }
                for kind, way in ways.items():
                    print(json.dumps(told(kind, [way() for _ in range(args.runs)])), flush=True)
                queue.close()
            break


if __name__ == "__main__":
    main()
