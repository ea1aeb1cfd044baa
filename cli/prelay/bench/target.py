"""What answers at the URL: its model, and for a Prelay its workers."""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx

from prelay_queue.client import SyncQueue
from prelay_queue.errors import QueueError
from prelay_queue.server import inspect
from prelay_queue.settings import QueueSettings

from ..errors import CliError

#: Of each worker's heartbeat.
_KEPT = ("role", "dtype", "exact", "threads", "block_size", "context_len", "numerics")


def describe(url: str, model: str | None, headers: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Return {"url", "model"} and, where it is a Prelay, mode, exactness, threads, dtype and KV sizes.

    Raise CliError with one line where nothing answers, or no OpenAI-style API.
    """
    timeout = httpx.Timeout(30, connect=5)
    with httpx.Client(base_url=url, headers=headers, timeout=timeout, trust_env=False) as client:
        found: dict[str, Any] = {"url": url, "model": model or _first_model(client)}
        return found | _workers(client)


def _first_model(client: httpx.Client) -> str:
    try:
        return str(client.get("/v1/models").raise_for_status().json()["data"][0]["id"])
    except httpx.HTTPStatusError as error:
        raise CliError(f"{client.base_url}v1/models answers with status {error.response.status_code}") from None
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        why = str(error) or type(error).__name__
        raise CliError(f"no server answers at {client.base_url} ({why}); start one: prelay serve") from None
    except (ValueError, KeyError, IndexError, TypeError):
        raise CliError(f"{client.base_url} answers, and is no OpenAI-style API") from None


def _workers(client: httpx.Client) -> dict[str, Any]:
    try:
        answer = client.get("/admin/workers")
        beats = answer.json()["workers"] if answer.status_code == 200 else []
    except (httpx.HTTPError, ValueError, KeyError, TypeError):
        beats = []  # another kind of server: it tells nothing of this
    return about_workers([beat for beat in beats if not beat.get("stale")])


def about_workers(beats: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The one word each that a table has room for, and the workers themselves. None: the server does not say."""
    workers = [_worker(beat) for beat in beats]
    return {
        "mode": _mode({str(worker["role"]) for worker in workers}),
        "exact": _common(worker["exact"] for worker in workers),
        "threads": _common(worker["threads"] for worker in workers),
        "dtype": _common(worker["dtype"] for worker in workers),
        "queue_server": _common({_queue_server(_environment_of(beat).get("PRELAY_REDIS_URL")) for beat in beats}),
        "workers": workers,
    }


def _worker(beat: dict[str, Any]) -> dict[str, Any]:
    kept = {name: beat.get(name) for name in _KEPT}
    kept["kv_blocks"] = (beat.get("kv") or {}).get("total")
    return kept


def _environment_of(beat: dict[str, Any]) -> Mapping[str, str]:
    """What a worker was started with: empty unless it runs on this machine, and this user may see it."""
    if beat.get("host") != socket.gethostname():
        return {}
    try:
        pairs = Path(f"/proc/{beat.get('pid')}/environ").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return {}
    return dict(pair.split("=", 1) for pair in pairs if "=" in pair)


def _queue_server(url: str | None) -> str | None:
    """Kind and version of the server behind a fleet."""
    if url is None:
        return None
    try:
        queue = SyncQueue(QueueSettings(url, fleet="bench"))
    except ValueError:
        return None
    try:
        found = inspect(queue.redis)
    except QueueError:
        return None
    finally:
        queue.close()
    return f"{found.kind} {found.version}"


def _mode(roles: set[str]) -> str | None:
    if not roles:
        return None
    if roles == {"unified"}:
        return "unified"
    return "disaggregated" if roles == {"prefill", "decode"} else "+".join(sorted(roles))


def _common(values: Any) -> str | None:
    found = sorted({str(value) for value in values if value is not None})
    return " and ".join(found) or None
