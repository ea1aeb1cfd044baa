"""How long a stream stands still after a kill -9 of each part, with null workers and the product's own times.

    python -m benchmarks.recovery --runs 20

supervised   `prelay serve` with its own Redis: the supervisor starts again what died, and ends the leases of the dead
elsewhere    the host of the worker is gone: nobody but the lease says so, and another worker takes over (Redis and the
             API process are started again after as long as the supervisor waits)

An answer streams; the worker that runs it (for prefill: that computes its prompt), the API process or Redis is killed.
Measured is the time to the next token that was not on its way. The clients of an API process lose their connections
with it; for it two times are measured: until the job goes on, and until a new client has its first token. What a killed
prefill costs holds the prompt's computation (PROMPT x PREFILL_MS). Each answer is checked to its end. Run from the
repository's root.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import signal
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil

from prelay_queue.client import SyncQueue
from prelay_queue.scripts import text
from prelay_queue.settings import QueueSettings
from prelay_queue.state import State
from prelay_text.fingerprint import fingerprint
from prelay_worker.config import NullModel, Role
from tests.bed.chain import Listener, check_stream
from tests.bed.ports import free_port
from tests.bed.processes import Api, Fleet, fleet, until, until_ready
from tests.bed.servers import Server, binary_of, running
from tests.bed.serving import Serving, serving
from tests.bed.tokenizer import make_tokenizer

STEP_MS, PREFILL_MS, PROMPT, TOKENS = 10, 4, 100, 600
#: What the supervisor waits before it starts again what died the first time, seconds.
AGAIN_AFTER_S = 0.2
#: Nobody sweeps before it has been in contact with Redis for a whole lease: a service is older than that before the
#: first kill, seconds.
SETTLED_S = 11.0
#: What comes within this time of the kill of Redis was on its way, seconds.
ON_ITS_WAY_S = 0.1
_numbers = itertools.count()


class Supervised:
    """`prelay serve`: nothing is done here after a kill."""

    def __init__(self, serve: Serving, model: Path) -> None:
        self.url = serve.url
        self.queue = SyncQueue(QueueSettings(f"unix://{serve.state.name}/server/redis.sock", fingerprint(model)))
        self._serve = serve

    def api_pid(self) -> int:
        children = psutil.Process(self._serve.process.pid).children(recursive=True)
        (api,) = [child for child in children if child.cmdline()[1:5] == ["-P", "-m", "prelay", "api"]]
        return api.pid

    def redis_pid(self) -> int:
        return int(self.queue.redis.info("server")["process_id"])

    def revive(self, part: str) -> None:
        """The supervisor does it."""


class Elsewhere:
    """A fleet of two workers of each role, without a supervisor."""

    def __init__(self, found: Fleet, server: Server) -> None:
        self._fleet, self._server, self._port = found, server, free_port()
        self.queue = SyncQueue(found.queue)
        self._api: Api = found.api(port=self._port)
        self.url = self._api.url
        for role in (Role.PREFILL, Role.PREFILL, Role.DECODE, Role.DECODE):
            self._start(role)
        until_ready(self.url)

    def _start(self, role: Role) -> None:
        self._fleet.worker(role, null=NullModel(step_ms=STEP_MS, prefill_ms_per_token=PREFILL_MS))

    def api_pid(self) -> int:
        return self._api.pid

    def redis_pid(self) -> int:
        return self._server.pid

    def revive(self, part: str) -> None:
        """Put one in the place of what was killed; returns when it serves."""
        time.sleep(AGAIN_AFTER_S)
        if part == "redis":
            self._server.start()
        elif part == "api":
            self._api = self._fleet.api(port=self._port)
        else:
            self._start(Role(part))


Site = Supervised | Elsewhere


def ask(site: Site) -> tuple[list[int], Listener]:
    prompt = [next(_numbers) % 1000, *range(PROMPT - 1)]
    body = {"model": "null", "prompt": prompt, "max_tokens": TOKENS}
    return prompt, Listener(site.url, "/v1/completions", body)


def until_owned(site: Site, state: State) -> tuple[str, int, int]:
    """Wait until the one job is in `state` with a worker: its id, epoch and the worker's pid."""

    def look() -> tuple[str, int, int] | None:
        for raw in site.queue.redis.zrange(site.queue.keys.leases, 0, -1):
            job = text(raw)
            fields: Any = site.queue.redis.hmget(site.queue.keys.job(job), "st", "ep", "ow")
            if fields[0] == state.encode() and fields[2]:
                return job, int(fields[1]), int(fields[2].split(b":")[1])
        return None

    found: tuple[str, int, int] = until(look, 60, every_s=0.002)
    return found


def kill(pid: int) -> float:
    """SIGKILL; return when."""
    os.kill(pid, signal.SIGKILL)
    return time.monotonic()


def next_frame(client: Listener, after: float, wanted: Callable[[str], bool] = lambda _: True) -> float:
    """Wait for the first frame after a moment whose cursor is `wanted`; return when it came."""

    def look() -> float | None:
        return next((frame.at for frame in client.found.frames if frame.at > after and wanted(frame.id)), None)

    at: float = until(look, 120, every_s=0.005)
    return at


def check(prompt: list[int], client: Listener) -> None:
    check_stream(client.end(120), prompt, TOKENS)


def killed_prefill(site: Site) -> dict[str, float]:
    prompt, client = ask(site)
    _, _, pid = until_owned(site, State.PREFILL)
    killed = kill(pid)
    found = {"next_token_s": next_frame(client, killed) - killed}
    site.revive("prefill")
    check(prompt, client)
    return found


def killed_decode(site: Site) -> dict[str, float]:
    prompt, client = ask(site)
    until(lambda: len(client.ids) > 50, 60)
    _, epoch, pid = until_owned(site, State.DECODE)
    killed = kill(pid)
    found = {"next_token_s": next_frame(client, killed, lambda at: int(at.partition("-")[0]) > epoch) - killed}
    site.revive("decode")
    check(prompt, client)
    return found


def killed_redis(site: Site) -> dict[str, float]:
    prompt, client = ask(site)
    until(lambda: len(client.ids) > 50, 60)
    killed = kill(site.redis_pid())
    site.revive("redis")
    found = {"next_token_s": next_frame(client, killed + ON_ITS_WAY_S) - killed}
    check(prompt, client)
    return found


def killed_api(site: Site) -> dict[str, float]:
    _, client = ask(site)
    until(lambda: len(client.ids) > 50, 60)
    job, _, _ = until_owned(site, State.DECODE)
    before = int(site.queue.redis.hget(site.queue.keys.job(job), "nx") or 0)
    killed = kill(site.api_pid())
    until(lambda: int(site.queue.redis.hget(site.queue.keys.job(job), "nx") or 0) > before, 60, every_s=0.002)
    goes_on = time.monotonic() - killed
    with contextlib.suppress(httpx.TransportError):
        client.end()
    site.revive("api")
    until(lambda: serves(site.url), 60)
    prompt, client = ask(site)
    first = next_frame(client, killed) - killed
    check(prompt, client)
    return {"job_goes_on_s": goes_on, "new_client_first_token_s": first}


def serves(url: str) -> bool:
    try:
        with httpx.Client(verify=False) as client:
            return client.get(f"{url}/health/live").status_code == 200
    except httpx.TransportError:
        return False


PARTS = {"prefill": killed_prefill, "decode": killed_decode, "api": killed_api, "redis": killed_redis}


@contextlib.contextmanager
def supervised(model: Path) -> Iterator[Site]:
    null = (
        "--null-model",
        "--null-step-ms",
        str(STEP_MS),
        "--null-prefill-ms",
        str(PREFILL_MS),
        "--null-vocab",
        "1000",
    )
    with serving(*null, "--served-model-name", "null", model=model) as serve:
        yield Supervised(serve, model)


@contextlib.contextmanager
def elsewhere(model: Path) -> Iterator[Site]:
    for server in running("redis" if binary_of("redis") else "valkey"):
        server.client.config_set("appendfsync", "everysec")
        with fleet(server.settings(), model) as found:
            yield Elsewhere(found, server)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=20, help="kills of each part")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--modes", nargs="+", choices=("supervised", "elsewhere"), default=["supervised", "elsewhere"])
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="recovery-") as folder:
        model = make_tokenizer(Path(folder))
        modes = {"supervised": supervised, "elsewhere": elsewhere}
        found = {mode: measure(modes[mode], model, args.runs, args.parts) for mode in args.modes}
    print(json.dumps({"runs": args.runs, "step_ms": STEP_MS, "prompt_ms": PROMPT * PREFILL_MS, **found}, indent=1))


def measure(
    mode: Callable[[Path], contextlib.AbstractContextManager[Site]], model: Path, runs: int, parts: list[str]
) -> dict[str, Any]:
    """Kill each part once in a service of its own: a supervisor waits longer for what died a moment ago."""
    samples: dict[str, dict[str, list[float]]] = {part: {} for part in parts}
    for _ in range(runs):
        with mode(model) as site:
            time.sleep(SETTLED_S)
            for part in parts:
                for name, seconds in PARTS[part](site).items():
                    samples[part].setdefault(name, []).append(seconds)
            site.queue.close()
    return {part: {name: summary(values) for name, values in by.items()} for part, by in samples.items()}


def summary(values: list[float]) -> dict[str, float]:
    return {"p50": round(statistics.median(values), 3), "max": round(max(values), 3)}


if __name__ == "__main__":
    main()
