"""A fleet of null workers in real processes, with a supervisor, clients that check every token, and no API."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import orjson
from redis.exceptions import RedisError

from prelay_queue.client import SyncQueue
from prelay_queue.errors import QueueUnavailable
from prelay_queue.events import LogView
from prelay_queue.job import JobSpec, Priority, Sampling
from prelay_queue.log import read_log_sync
from prelay_queue.scripts import NewJob, text
from prelay_queue.settings import QueueSettings, QueueTimes
from prelay_worker.config import NullModel, Role, WorkerConfig
from prelay_worker.null import null_token
from tests.bed.child import encode
from tests.bed.forks import ROOT
from tests.bed.pools import NO_END, is_accounted, is_whole
from tests.bed.processes import until
from tests.bed.servers import Server
from tests.faults.forked import Forked, WorkerProcess

#: A second and a half where the product waits ten, and the rest in proportion.
TIMES = QueueTimes(
    lease_ms=1_500, renew_ms=400, heartbeat_ms=200, worker_ttl_ms=2_000, pending_idle_ms=600, preempt_grace_ms=300,
    queued_check_ms=500, sweep_ms=200, api_grace_ms=600_000,
)  # fmt: skip
#: A frozen worker is continued after this long: its leases have ended and its jobs run elsewhere.
THAW_S = TIMES.lease_ms / 1000 + 0.7
NULL = NullModel(step_ms=2)


@dataclass
class Client:
    """One job as its client sees it: what was delivered can never be taken back."""

    job: NewJob
    delivered: tuple[int, ...] = ()

    @property
    def id(self) -> str:
        return self.job.spec.id

    @property
    def token(self) -> str:
        return self.job.attachment


@dataclass
class NullFleet:
    """Workers on one fleet name. `tend` is the supervisor: the dead are started again, the frozen continued."""

    server: Server
    folder: Path
    null: NullModel = NULL
    times: QueueTimes = TIMES
    url: str = ""  # another way to the server than its socket
    workers: list[WorkerProcess] = field(default_factory=list)
    ended: list[Forked] = field(default_factory=list)
    clients: list[Client] = field(default_factory=list)
    nudge: Callable[[], None] = lambda: None  # done again and again while jobs run
    relay: bool = True  # clients answer preempts with what they delivered
    checked: bool = False  # nothing is left: no block, no process, no key
    chance: random.Random = field(default_factory=lambda: random.Random(7))

    def __post_init__(self) -> None:
        self.settings: QueueSettings = self.server.settings(times=self.times)
        self.queue = SyncQueue(self.settings)
        self.keys = self.queue.keys
        self.redis = self.queue.redis
        self._accounts_at = 0.0

    # Processes.

    def start(self, role: Role, faults: str = "", blocks: int = 64, **changes: Any) -> WorkerProcess:
        settings = replace(self.settings, url=self.url) if self.url else self.settings
        config = WorkerConfig(role, settings, None, kv_blocks=blocks, block_size=4, null=self.null)
        worker = self._worker(replace(config, **changes), faults)
        self.workers.append(worker)
        return worker

    def _worker(self, config: WorkerConfig, faults: str = "") -> WorkerProcess:
        return WorkerProcess(config, faults, self.folder)

    def until_ready(self) -> None:
        def ready() -> bool:
            assert not [worker for worker in self.workers if worker.code == 1], self.logs()
            return len(self.status()) == len(self.workers) and all(worker.id for worker in self.workers)

        until(ready, 20)

    def tend(self) -> None:
        for i, worker in enumerate(self.workers):
            if worker.code is not None:
                self.ended.append(worker)
                self.workers[i] = self._worker(worker.config)
            else:
                thaw(worker)
        self._check_accounts()

    def _check_accounts(self) -> None:
        """Whatever happens: what workers say of their pools adds up. Redis may be away."""
        if time.monotonic() < self._accounts_at:
            return
        self._accounts_at = time.monotonic() + 0.3
        with contextlib.suppress(RedisError):
            beats = self.status()
            assert all(is_accounted(beat["kv"]) for beat in beats), beats

    def status(self) -> list[dict[str, Any]]:
        """The heartbeats of the workers that run now."""
        pids = {worker.pid for worker in self.workers if worker.code is None}
        names = self.redis.zrange(self.keys.workers, 0, -1)
        found = self.of_each("get", [self.keys.worker(text(name)) for name in names])
        beats = [orjson.loads(raw) for raw in found if raw is not None]
        return [beat for beat in beats if beat["pid"] in pids]

    def now_ms(self) -> int:
        seconds, micros = self.redis.time()
        return int(seconds) * 1000 + int(micros) // 1000

    # Clients.

    def submit(self, count: int = 6, prompt: int = 6, max_tokens: int = 24, **changes: Any) -> list[Client]:
        """Submit jobs with prompts of their own and a client on each."""
        clients: list[Client] = []
        for _ in range(count):
            n = len(self.clients) + len(clients)
            spec = JobSpec(f"r{n}/0", tuple(range(n, n + prompt)), Sampling(max_tokens, ignore_eos=True))
            clients.append(Client(NewJob(replace(spec, **changes), f"api:t#{n}")))
        self.queue.run(self.queue.scripts.submit([client.job for client in clients]))
        self.clients.extend(clients)
        return clients

    def view(self, client: Client) -> LogView:
        found = read_log_sync(self.queue, client.id)
        assert found is not None, f"{client.id} is gone"
        return found

    def until_done(self, timeout_s: float = 40, clients: Sequence[Client] | None = None) -> None:
        """Supervise, and relay, until every job has ended."""
        waiting = list(self.clients if clients is None else clients)
        deadline = time.monotonic() + timeout_s
        while waiting:
            self.tend()
            self.nudge()
            with contextlib.suppress(QueueUnavailable):  # the server is away; it comes back
                self.queue.run(self.queue.scripts.attend("api:t", 30, begin=False))
                waiting = [client for client in waiting if not self._relay(client)]
            assert time.monotonic() < deadline, f"not done: {[(c.id, self.view(c)) for c in waiting]}\n{self.logs()}"
            time.sleep(0.05)

    def _relay(self, client: Client) -> bool:
        """Deliver some of what stands, answer a preempt; True when the job is over."""
        view = self.view(client)
        kept = view.ids[: len(client.delivered)]
        assert kept == client.delivered, f"{client.id} contradicts what was delivered: {kept} {client.delivered}"
        if view.state == "preempted":
            if self.relay and self.chance.random() < 0.7:  # or leave it to the sweep
                resume = len(client.delivered)
                self.queue.run(self.queue.scripts.requeue(client.id, view.epoch, resume, client.token))
        elif self.chance.random() < 0.5:
            client.delivered = view.ids[: self.chance.randint(len(client.delivered), len(view.ids))]
        return view.state == "done"

    # What must hold in the end.

    def check_answers(self) -> None:
        for client in self.clients:
            self.check_answer(client)

    def check_answer(self, client: Client, reason: str = "length") -> None:
        """One end, and each token the right one for what stands before it (and for its epoch, in divergent mode)."""
        spec, view = client.job.spec, self.view(client)
        entries: Any = self.redis.xrange(self.keys.log(client.id))
        assert (view.state, view.reason, view.error) == ("done", reason, ""), (client.id, view)
        assert [b"f" in data for _, data in entries] == [False] * len(view.ids) + [True]
        assert len(view.ids) == spec.sampling.max_tokens or reason != "length"
        for seq, (entry, data) in enumerate(entries[:-1]):
            epoch, _, place = text(entry).partition("-")
            assert int(place) == seq
            salt = int(epoch) if self.null.divergent else None
            right = null_token((*spec.prompt_ids, *view.ids[:seq]), salt, self.null.vocab_size)
            assert int(data[b"t"]) == right, f"{client.id}: token {seq} of epoch {epoch} is wrong"
        assert view.ids[: len(client.delivered)] == client.delivered

    def until_free(self, timeout_s: float = 15) -> None:
        """Wait until every pool is whole again, with no new traffic. Every heartbeat accounts for all of its blocks."""
        since = self.now_ms()

        def free() -> bool:
            self.tend()
            beats = [beat for beat in self.status() if beat["t"] > since]
            assert all(is_accounted(beat["kv"]) for beat in beats), beats
            idle = [b for b in beats if is_whole(b["kv"]) and b["running"] == b["waiting"] == 0]
            return len(idle) == len(self.workers)

        try:
            until(free, timeout_s)
        except AssertionError:
            raise AssertionError(f"pools are not free: {self.status()}\n{self.logs()}") from None

    @property
    def processes(self) -> Sequence[Forked]:
        """All that run, or should, in the order in which they are told to end."""
        return self.workers

    def check_nothing_left(self) -> None:
        """All blocks are free with no new traffic; then all processes end well, and leave no key behind but those of
        retained jobs and of empty work streams. A fleet asks for it when its test has not."""
        self.until_free()
        self.checked = True
        for process in self.processes:
            process.end()
        codes = [process.stop() for process in self.processes]
        assert codes == [0] * len(codes), f"{codes}\n{self.logs()}"
        dead = {str(process.pid) for process in self.ended}
        names = self.redis.keys(f"{self.keys.prefix}*")
        for raw, ttl in zip(names, self.of_each("pttl", names), strict=True):
            self._check_key(raw, ttl, dead)

    def of_each(self, command: str, names: Sequence[bytes | str], *args: Any) -> list[Any]:
        """The answer to one command for each key, in one round trip."""
        with self.redis.pipeline(transaction=False) as pipe:
            for name in names:
                getattr(pipe, command)(name, *args)
            return list(pipe.execute())

    def _check_key(self, raw: bytes | str, ttl: int, dead: set[str]) -> None:
        """May this key be there when all have ended? Keys of those that were killed go by themselves."""
        key = text(raw).removeprefix(self.keys.prefix)
        kind, _, rest = key.partition(":")
        if kind == "work":
            assert self.redis.xlen(raw) == 0, key
            assert all(group["pending"] == 0 for group in self.redis.xinfo_groups(raw)), key
        elif kind in ("job", "log"):
            assert ttl != NO_END, key
        elif kind in ("worker", "ctl"):
            assert rest.split(":")[1] in dead, f"{key}\n{self.logs()}"
            assert ttl != NO_END, key
        elif kind == "live":  # of one that ended well too, where Redis was too slow for its farewell
            assert ttl != NO_END, key
        elif kind == "workers":
            names = [text(name) for name in self.redis.zrange(raw, 0, -1)]
            assert {name.split(":")[1] for name in names} <= dead, f"{names}\n{self.logs()}"
        else:  # apis that are dead: the sweep after the grace takes them out
            assert kind in ("domains", "apis", "dead", "drain", "restarts"), key

    def finish(self, timeout_s: float = 40) -> None:
        """Wait for all jobs and check everything."""
        self.until_done(timeout_s)
        self.check_answers()
        self.check_nothing_left()

    def logs(self) -> str:
        return "\n".join(f"--- {worker!r}\n{worker.log[-5000:]}" for worker in (*self.ended, *self.processes))

    def close(self) -> None:
        for process in self.processes:
            process.kill()
        self.redis.delete(*self.redis.keys(f"{self.keys.prefix}*"), "none")
        self.queue.close()


def thaw(process: Forked) -> None:
    """Continue a process that has been frozen for long enough."""
    if not process.frozen:
        process.frozen_at = None
        return
    process.frozen_at = process.frozen_at or time.monotonic()
    if time.monotonic() - process.frozen_at > THAW_S:
        process.send(signal.SIGCONT)


@contextlib.contextmanager
def null_fleet(server: Server, **options: Any) -> Iterator[NullFleet]:
    """A fleet that leaves no block, no process and no key."""
    with (
        tempfile.TemporaryDirectory(prefix="fleet-") as folder,
        ended(NullFleet(server, Path(folder), **options)) as fleet,
    ):
        yield fleet


Fleet = TypeVar("Fleet", bound=NullFleet)


@contextlib.contextmanager
def ended(fleet: Fleet) -> Iterator[Fleet]:
    """The life of a fleet: after a test that went well nothing may be left; its processes end in any case."""
    try:
        yield fleet
        if not fleet.checked:
            fleet.check_nothing_left()
    finally:
        fleet.close()


def start_exec(config: WorkerConfig, faults: str = "") -> subprocess.Popen[bytes]:
    """Start a worker as the product does, by exec."""
    return subprocess.Popen(
        [sys.executable, "-m", "tests.bed.child", "worker", encode(config)],
        cwd=ROOT,
        env={**os.environ, "PRELAY_FAULTS": faults},
    )


__all__ = ["NULL", "THAW_S", "TIMES", "Client", "NullFleet", "Priority", "WorkerProcess", "null_fleet", "start_exec"]
