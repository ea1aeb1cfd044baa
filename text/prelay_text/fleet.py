"""The workers as their heartbeats show them: who lives, what they can hold, whether requests would be served. Pure."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import orjson

from .resolve import Limits

log = logging.getLogger("prelay.fleet")

#: A worker whose heartbeat, or whose model loop's last stamp, is older than this does not count, ms.
STALE_MS = 4_000


@dataclass(frozen=True, slots=True)
class Worker:
    """One heartbeat, and its age by the server's clock."""

    data: dict[str, Any]
    age_ms: int

    @property
    def role(self) -> str:
        return str(self.data.get("role", ""))

    @property
    def state(self) -> str:
        return str(self.data.get("state", ""))

    @property
    def stale(self) -> bool:
        return self.age_ms > STALE_MS or _number(self.data.get("progress_ms")) > STALE_MS

    @property
    def serves(self) -> bool:
        """Takes jobs and gets on with them."""
        return self.state == "ready" and not self.stale

    @property
    def pool_tokens(self) -> int:
        kv = self.data.get("kv")
        return _number(self.data.get("block_size")) * _number(kv.get("total") if isinstance(kv, dict) else 0)

    @property
    def context_len(self) -> int:
        return _number(self.data.get("context_len"))

    def as_dict(self) -> dict[str, Any]:
        return {**self.data, "age_ms": self.age_ms, "stale": self.stale}


def _number(value: object) -> int:
    return int(value) if isinstance(value, int | float) else 0


@dataclass(frozen=True, slots=True)
class Fleet:
    """All workers that have a heartbeat."""

    workers: tuple[Worker, ...] = ()

    def problems(self) -> list[str]:
        """Why a request would not be served now; empty when it would."""
        serving = {worker.role for worker in self.workers if worker.serves}
        if "unified" in serving or serving >= {"prefill", "decode"}:
            return []
        return [self._missing(role) for role in ("prefill", "decode") if role not in serving]

    def _missing(self, role: str) -> str:
        mine = [worker for worker in self.workers if worker.role == role]
        if not mine:
            return f"no {role} worker"
        stuck = sum(worker.stale for worker in mine)
        others = sorted({worker.state for worker in mine if not worker.stale})
        parts = ([f"{stuck} make no progress"] if stuck else []) + [f"others are {state}" for state in others]
        return f"no {role} worker is ready: of {len(mine)}, {', '.join(parts)}"

    def limits(self, context_len: int) -> Limits:
        """What a request may take: the smallest context, and the largest pools it has to pass through."""
        live = [worker for worker in self.workers if not worker.stale and worker.pool_tokens > 0]
        contexts = [worker.context_len for worker in live if worker.context_len > 0]
        return Limits(min([context_len, *contexts]), _pool(live))


def _pool(live: Iterable[Worker]) -> int | None:
    """The most tokens that some way through the fleet can hold; None while there is no way."""
    largest: dict[str, int] = {}
    for worker in live:
        largest[worker.role] = max(largest.get(worker.role, 0), worker.pool_tokens)
    ways = [largest["unified"]] if "unified" in largest else []
    if "prefill" in largest and "decode" in largest:
        ways.append(min(largest["prefill"], largest["decode"]))
    return max(ways) if ways else None


def fleet_of(beats: Iterable[bytes | None], now_ms: int) -> Fleet:
    """The fleet whose heartbeats these are, at the server's time; None is one that is gone."""
    found = (_worker(raw, now_ms) for raw in beats if raw is not None)
    return Fleet(tuple(sorted((w for w in found if w), key=lambda w: str(w.data.get("id")))))


def _worker(raw: bytes, now_ms: int) -> Worker | None:
    try:
        data = orjson.loads(raw)
        return Worker(data, max(0, now_ms - int(data["t"])))
    except (ValueError, KeyError, TypeError):
        log.error("cannot read a heartbeat: %r", raw[:200])
        return None
