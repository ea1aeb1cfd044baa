"""The running fleet of `prelay serve`: started together, watched, stopped in order."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shlex
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from prelay_queue.settings import QueueSettings
from prelay_text.fingerprint import fingerprint

from .apikeys import bearer
from .cards import places
from .child import ChildSpec
from .embedded import EmbeddedServer
from .errors import CliError
from .fleetmetrics import VARIABLES, FleetMetrics, variables
from .nursery import PRELAY, Nursery, modules_for
from .options import OPTIONS
from .queueserver import disown, inspect_server
from .readiness import Readiness, base_url
from .redact import redact
from .report import Report
from .roles import thread_variables
from .segments import mapped_segments, sweep_segments
from .settings import Settings
from .sizing import Sizes
from .supervisor import Supervisor

#: Time for a worker to give its jobs back, in seconds. It waits for no answer to finish: another worker goes on.
WORKER_STOP_S = 15.0
#: Time for a batch worker to note how far its batch is, in seconds. Another goes on from there.
BATCH_STOP_S = 10.0
#: What workers get to unmap a dead one's memory, and how often it is looked whether they have, in seconds.
UNMAP_S, UNMAP_CHECK_S = 5.0, 0.1
#: How often it is looked whether the server's socket is still there, in seconds.
SOCKET_CHECK_S = 2.0
#: What the API gets beyond its own grace before it is killed, in seconds.
API_STOP_EXTRA_S = 5.0
#: By how much decode workers stand back for prefill workers on the same cores (docs/performance.md).
DECODE_NICE = 10
#: Variables that only the API process gets.
_KEYS = ("PRELAY_API_KEY", "PRELAY_API_KEY_FILE")


@dataclass(frozen=True, slots=True)
class Plan:
    """What to run. `server` is None where a URL was given."""

    settings: Settings
    folder: Path
    name: str
    sizes: Sizes
    server: EmbeddedServer | None
    api_keys: tuple[str, ...] = field(default=(), repr=False)
    metrics: Path | None = None  # where all processes keep theirs

    @property
    def url(self) -> str:
        url = self.server.url if self.server else self.settings.url
        assert url is not None  # settings.load saw to it
        return url

    def workers(self) -> list[tuple[str, str]]:
        """Return (name, role) of each worker process."""
        prefill, decode, unified = self.settings.counts()
        roles = [("prefill", prefill), ("decode", decode), ("unified", unified)]
        return [(f"{role}-{number}", role) for role, count in roles for number in range(count)]

    def apis(self) -> list[str]:
        """Return the name of each API process."""
        return ["api"] if self.settings.api == 1 else [f"api-{number}" for number in range(self.settings.api)]

    def batches(self) -> list[str]:
        """Return the name of each batch worker process."""
        return [f"batch-{number}" for number in range(self.settings.batch)]

    def _files(self) -> dict[str, str]:
        """Return where files and batches are; nowhere without batch workers, unless others may run batches there."""
        folder = self.settings.files_dir or (self.settings.state_dir / "files" if self.settings.batch else None)
        return {"PRELAY_FILES_DIR": str(folder.absolute())} if folder else {}

    def environment(self, threads: int) -> dict[str, str]:
        """Return a child's environment: ours, without the settings we read, with those we decided, and no API key."""
        read = {option.variable for option in OPTIONS.values()} | {"PRELAY_CONFIG", *VARIABLES}
        inherited = {name: value for name, value in os.environ.items() if name not in read}
        decided = {
            "PRELAY_REDIS_URL": self.url,
            "PRELAY_MODEL": str(self.folder),
            "PRELAY_SERVED_MODEL_NAME": self.name,
            "PRELAY_THREADS": str(self.sizes.threads),
            "PRELAY_DECODE_NICE": str(self._decode_nice()),
            "PRELAY_METRICS_PORT": "0",  # the API shows those of all
            "PYTHONUNBUFFERED": "1",
        }
        given = {name: value for name, value in self.settings.environment().items() if name not in _KEYS}
        return inherited | given | decided | self._blocks() | self._files() | thread_variables(threads)

    def _blocks(self) -> dict[str, str]:
        """Return how large the pools are; on GPUs each worker sees what fits."""
        if self.settings.on_gpus:
            return {}
        kv, prefill = (str(blocks or 1) for blocks in (self.sizes.kv_blocks, self.sizes.prefill_kv_blocks))
        return {"PRELAY_KV_BLOCKS": kv, "PRELAY_PREFILL_KV_BLOCKS": prefill}

    def _decode_nice(self) -> int:
        """Return how far decode workers stand back: for prefill workers, whose cores they share."""
        given, (prefill, _, _) = self.settings.decode_nice, self.settings.counts()
        return given if given is not None else DECODE_NICE if prefill and not self.settings.null_model else 0

    def _of_api(self) -> dict[str, str]:
        """Return what only API processes need: workers ask nobody for a key."""
        keys = {name: value for name, value in self.settings.environment().items() if name in _KEYS}
        return keys | ({"PRELAY_SHARE_PORT": "true"} if self.settings.api > 1 else {})

    def child(self, name: str, role: str, stop_s: float, threads: int) -> ChildSpec:
        command = (*PRELAY, role)
        environment = self.environment(threads) | (self._of_api() if role == "api" else {})
        environment |= variables(self.metrics, name)
        if place := places(self.settings).get(name):
            environment |= place.variables()
        before = _sweep_first if role == "prefill" else None
        after = None if role == "api" else self._disown
        return ChildSpec(name, command, environment, stop_s, before_start=before, after_death=after)

    def batch_child(self, name: str, given_up: Callable[[CliError], None]) -> ChildSpec:
        """One that cannot run is no reason to stop serving: its batches wait."""
        command = (*PRELAY, "batch-worker")
        return ChildSpec(name, command, self.environment(threads=1), BATCH_STOP_S, given_up=given_up)

    def nursery(self, warn: Callable[[str], None]) -> Nursery | None:
        """Return where workers come from; those of the null model import little and are started plainly."""
        if self.settings.null_model:
            return None
        return Nursery(self.environment(self.sizes.threads), modules_for(self.folder), warn)

    async def _disown(self, pid: int) -> None:
        """A worker that its parent saw end needs no lease to run out before its jobs go on elsewhere."""
        await asyncio.to_thread(disown, QueueSettings(self.url, fingerprint(self.folder)), pid)


async def _sweep_first() -> None:
    """A prefill worker that died held its pool in /dev/shm; its successor may need the room.

    On a GPU it held it in memory that is free only when all others have unmapped it, which they do when they see that
    its file has no owner.
    """
    deadline = time.monotonic() + UNMAP_S
    while await asyncio.to_thread(mapped_segments) and time.monotonic() < deadline:  # noqa: ASYNC110 - locks tell nobody
        await asyncio.sleep(UNMAP_CHECK_S)
    await asyncio.to_thread(sweep_segments)


class Fleet:
    """One run of a plan."""

    def __init__(self, plan: Plan, report: Report) -> None:
        self.plan = plan
        self.report = report
        self._metrics = FleetMetrics(plan.metrics)
        self._begun = time.monotonic()
        self._stop = asyncio.Event()

    async def run(self) -> int:
        """Serve until a signal. Return 0, or 130 after a hurried stop. Raise CliError when a part gives up."""
        self._supervisor = Supervisor(self.report.child_line, self._metrics.restarted)
        self._nursery = self.plan.nursery(self.report.warn)
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(number, self._on_signal)
        up = asyncio.create_task(self._bring_up())
        guard = asyncio.create_task(self._guard_socket())
        stop = asyncio.create_task(self._stop.wait())
        try:
            await self._watch(up, stop)
        finally:
            for task in (up, stop, guard):
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError, CliError):
                    await task
            self.report.settled()
            await self._shut_down()
        return 130 if self._supervisor.hurry.is_set() else 0

    def _on_signal(self) -> None:
        if self._stop.is_set():
            self.report.say("stopping at once")
            self._supervisor.hurry.set()
        self._stop.set()

    async def _watch(self, up: asyncio.Future[Any], stop: asyncio.Future[Any]) -> None:
        """Return when a stop is asked for. Raise what went wrong."""
        failure: asyncio.Future[Any] = self._supervisor.failure
        await asyncio.wait({up, stop, failure}, return_when=asyncio.FIRST_COMPLETED)
        if up.done() and not stop.done():
            up.result()
            await asyncio.wait({stop, failure}, return_when=asyncio.FIRST_COMPLETED)
        if failure.done() and not stop.done():
            failure.result()

    async def _bring_up(self) -> None:
        """Start everything, and say when it serves.

        1 The nursery, whose imports take longest, and the server. 2 The API and the workers at once. 3 Wait until the
        API says that the fleet is ready. 4 The batch workers: what they do can wait.
        """
        settings, supervisor = self.plan.settings, self._supervisor
        if self._nursery is not None:
            supervisor.keep(self._nursery.spec())
        await self._start_server()
        self.report.step(f"model {self.plan.name} ({self.plan.folder})")
        api_stop_s = settings.drain_s + settings.shutdown_grace_s + API_STOP_EXTRA_S
        for name in self.plan.apis():
            supervisor.keep(self.plan.child(name, "api", api_stop_s, threads=1))
        for name, role in self.plan.workers():
            spec = self.plan.child(name, role, WORKER_STOP_S, self.plan.sizes.threads)
            supervisor.keep(spec if self._nursery is None else self._nursery.nursed(spec))
        headers = bearer(self.plan.api_keys)
        await Readiness(settings.host, settings.port, supervisor, headers).wait(self.report.waiting)
        supervisor.started_up = True
        self.report.settled()
        for name in self.plan.batches():
            supervisor.keep(self.plan.batch_child(name, self._batch_worker_gone))
        self._say_ready()

    def _batch_worker_gone(self, error: CliError) -> None:
        self.report.warn(f"{error}; it is not started again, and batches wait for the others")

    async def _start_server(self) -> None:
        server = self.plan.server
        if server is not None:
            self.report.waiting(f"server: starting {server.binary}")
            keeper = self._supervisor.keep(server.spec())
            await server.wait_ready(lambda: keeper.child, self.report.waiting)
        info = await asyncio.to_thread(inspect_server, self.plan.url)
        self.report.settled()
        where = str(server.state.server) if server else redact(self.plan.url)
        self.report.step(f"server {info.kind} {info.version} ({where})")
        for warning in info.warnings():
            self.report.warn(warning)

    async def _guard_socket(self) -> None:
        """Restart the server when its socket was deleted: without it no new process ever reaches the queue."""
        server, before = self.plan.server, None
        while server is not None:
            await asyncio.sleep(SOCKET_CHECK_S)
            keeper = self._supervisor.keepers.get("server")
            child = keeper.child if keeper is not None and not server.has_socket() else None
            if child is not None and child is before:  # it had the time to make one
                self.report.warn(f"{server.state.socket} was deleted: the server starts again")
                child.send(signal.SIGTERM)
                await child.wait()
            before = child

    def _say_ready(self) -> None:
        sizes, (prefill, decode, unified) = self.plan.sizes, self.plan.settings.counts()
        pools = [
            f"{count} {role} × {blocks} KV blocks" if blocks else f"{count} {role}"
            for count, role, blocks in (
                (prefill, "prefill", sizes.prefill_kv_blocks),
                (decode, "decode", sizes.kv_blocks),
                (unified, "unified", sizes.kv_blocks),
            )
            if count
        ]
        url = base_url(self.plan.settings.host, self.plan.settings.port)
        took = time.monotonic() - self._begun
        batch = f"; {count} batch worker(s)" if (count := len(self.plan.batches())) else "; no batches"
        each = f"{', '.join(pools)}, {sizes.threads} thread(s) each{batch}"
        self.report.step(f"ready on {url} after {took:.1f} s ({each})")
        message = '[{"role": "user", "content": "Hello"}]'
        body = f'{{"model": "{self.plan.name}", "stream": true, "temperature": 0, "messages": {message}}}'
        key = ' -H "Authorization: Bearer $PRELAY_API_KEY"' if self.plan.api_keys else ""
        batches = f"  prelay batch run in.jsonl -o out.jsonl --url {url}\n" if count else ""
        self.report.say(
            f"  curl -N {url}/v1/chat/completions{key} -H 'Content-Type: application/json' -d {shlex.quote(body)}\n"
            f"  prelay chat --url {url}\n{batches}  Ctrl-C stops, in order"
        )

    async def _shut_down(self) -> None:
        """Stop everything, and leave no process, no segment and no socket.

        1 The API first: it takes no more work and ends its streams, which needs workers and queue to be there.
        2 Then the batch workers: they ask no more of the workers, and note how far they are.
           Then the workers: they give back what they hold, which needs the queue.
           Then the nursery, which tells how they end.
        3 Then the server: nobody writes to it any more.
        4 Then what a killed worker may have left in /dev/shm, and the metrics of all.
        """
        supervisor = self._supervisor
        if supervisor.keepers:
            self.report.say("stopping: the API, then the workers, then the server")
        await supervisor.stop(self.plan.apis())
        await supervisor.stop(self.plan.batches())
        await supervisor.stop([name for name, _ in self.plan.workers()])
        await supervisor.stop(["nursery"])
        if self._nursery is not None:
            self._nursery.close()
        await supervisor.stop(["server"])
        await asyncio.to_thread(sweep_segments)
        self._metrics.close()
        supervisor.close()
        if supervisor.keepers:
            self.report.say("stopped")
