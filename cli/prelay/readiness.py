"""Wait until a started fleet serves."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

import httpx

from .supervisor import Supervisor

#: Between two looks, in seconds.
LOOK_S = 0.2


def base_url(host: str, port: int) -> str:
    """Return the URL under which a client on this machine reaches an API that listens on `host`."""
    reached = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{reached}]:{port}" if ":" in reached else f"http://{reached}:{port}"


class Readiness:
    """Ready is: the API's own verdict, and every worker process of ours among the ready ones."""

    def __init__(self, host: str, port: int, supervisor: Supervisor, headers: Mapping[str, str]) -> None:
        """`headers` are sent along: the API may want a key."""
        self._url = base_url(host, port)
        self._headers = headers
        self._supervisor = supervisor

    async def wait(self, tell: Callable[[str], None]) -> None:
        """Return when ready; `tell` hears what is missing. Has no time limit: models may be large."""
        async with httpx.AsyncClient(base_url=self._url, headers=self._headers, timeout=5, trust_env=False) as client:
            while missing := await self._missing(client):
                tell(f"loading: {', '.join(missing)}")
                await asyncio.sleep(LOOK_S)

    async def _missing(self, client: httpx.AsyncClient) -> list[str]:
        try:
            answer = await client.get("/admin/workers")
            workers: list[dict[str, Any]] = answer.json()["workers"] if answer.status_code == 200 else []
            healthy = (await client.get("/health/ready")).status_code == 200
        except (httpx.HTTPError, ValueError, KeyError):
            return ["api", *self._waiting_workers(frozenset())]
        ready = frozenset(worker["pid"] for worker in workers if worker.get("state") == "ready")
        return self._waiting_workers(ready) or ([] if healthy else ["fleet"])

    def _waiting_workers(self, ready: frozenset[int]) -> list[str]:
        """Names of our workers that are not among the ready pids."""
        others = ("server", "nursery", "api", "batch")
        keepers = [k for name, k in self._supervisor.keepers.items() if name.partition("-")[0] not in others]
        return [k.spec.name for k in keepers if k.child is None or k.child.pid not in ready]
