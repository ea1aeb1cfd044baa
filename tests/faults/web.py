"""A null fleet with API processes, and clients that ask over HTTP."""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import orjson
from redis.exceptions import RedisError

from prelay_api.config import ApiConfig
from prelay_queue.errors import QueueUnavailable
from prelay_queue.scripts import text
from prelay_worker.null import null_token
from tests.bed.chain import NullChain, epochs_of
from tests.bed.servers import Server
from tests.bed.tokenizer import WORDS, make_tokenizer
from tests.faults import tally
from tests.faults.fleet import TIMES, NullFleet, ended, thaw
from tests.faults.forked import ApiProcess, Forked
from tests.faults.traffic import Ask, End, Shape, Traffic

#: An API process says every five seconds that it lives, so its grace cannot be as short as the other times.
WEB_TIMES = replace(TIMES, api_ttl_s=10, api_grace_ms=10_000)


@dataclass
class Log:
    """A job as Redis has it at the end."""

    reason: str
    epochs: list[int]
    ids: list[int]


@dataclass
class WebFleet(NullFleet):
    """Workers, API processes and their supervisor; `ask` begins the traffic, `finish` ends and checks everything.

    `lossy`: Redis loses data in this case, so logs may be gone, or built anew from what clients have.
    `diverging`: answers may end in `diverged`, which is said for what nobody can know any more.
    `refusals`: requests may be refused with 503 (Redis is away, or an API process was told so).
    """

    apis: list[ApiProcess] = field(default_factory=list)
    traffic: Traffic | None = None
    lossy: bool = False
    diverging: bool = False
    refusals: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self.model = make_tokenizer(self.folder / "model")

    # Processes.

    def start_api(self, faults: str = "", **changes: Any) -> ApiProcess:
        settings = replace(self.settings, url=self.url) if self.url else self.settings
        config = ApiConfig(settings, self.model, "null", port=0, keep_alive_s=2)
        api = ApiProcess(replace(config, **changes), faults, self.folder)
        self.apis.append(api)
        return api

    @property
    def processes(self) -> Sequence[Forked]:
        return [*self.apis, *self.workers]

    def tend(self) -> None:
        super().tend()
        for i, api in enumerate(self.apis):
            if api.code is not None:
                self.ended.append(api)
                self.apis[i] = ApiProcess(api.config, "", self.folder)
            else:
                thaw(api)

    def wait(self, what: Callable[[], Any], timeout_s: float = 60, tend: bool = True) -> None:
        """Supervise until `what` is true."""
        deadline = time.monotonic() + timeout_s
        while not what():
            if tend:
                self.tend()
            with contextlib.suppress(QueueUnavailable, RedisError):
                self.nudge()
            assert time.monotonic() < deadline, f"never became true: {what}\n{self.report()}"
            time.sleep(0.04)

    # Clients.

    def ask(self, width: int = 6, max_tokens: int = 60, shapes: Sequence[Shape] = tuple(Shape)) -> Traffic:
        """Begin the traffic: the API processes are asked in turn."""
        self.traffic = Traffic(self._pick, width, max_tokens, tuple(shapes))
        return self.traffic

    def _pick(self, n: int) -> ApiProcess | None:
        apis = [api for api in self.apis if api.url]
        return apis[(n + n // len(Shape)) % len(apis)] if apis else None  # each shape at each of them

    def evict(self, api: ApiProcess | None = None, worker: Forked | None = None) -> None:
        """Ask the workers, as an operator does, to give up what they run (for clients of `api`; in `worker`)."""
        for raw in self.redis.zrange(self.keys.leases, 0, -1):
            owner, viewers = (text(v or "") for v in self.redis.hmget(self.keys.job(text(raw)), "ow", "at"))
            theirs = api is None or viewers.startswith(f"{api.id}#")
            if owner and theirs and (worker is None or owner == worker.id):
                command = orjson.dumps({"op": "preempt", "id": text(raw), "ep": 0})
                self.redis.xadd(self.keys.control(owner), {"c": command})

    def frames_heard(self) -> int:
        """Frames that clients have heard so far."""
        assert self.traffic is not None
        return sum(len(ask.heard.frames) for ask in self.traffic.asks)

    # What must hold in the end.

    def finish(self, timeout_s: float = 60) -> None:
        """Ask no more, wait for every client and every job, and check everything."""
        traffic = self.traffic
        assert traffic is not None
        traffic.stop()
        self.wait(lambda: traffic.idle, timeout_s)
        self.wait(self._all_over, timeout_s)
        time.sleep(0.5)  # a request whose client left at once may only now be submitted, and is then cancelled
        self.wait(self._all_over, timeout_s)
        self.check_answers()
        self.check_nothing_left()

    def _all_over(self) -> bool:
        try:
            swept = (self.keys.queued, self.keys.leases, self.keys.preempted)
            return not any(self.redis.zcard(index) for index in swept)
        except RedisError:
            return False

    def check_answers(self) -> None:
        """Each client heard what is right, and what stands in the log; each job has one end."""
        assert self.traffic is not None
        jobs = self.redis.keys(self.keys.job("*"))
        assert all(state == b"done" for state in self.of_each("hget", jobs, "st")), jobs
        tokens = 0
        for ask in self.traffic.asks:
            try:
                tokens += self._check_ask(ask)
            except AssertionError as error:
                raise AssertionError(f"{ask!r}\n{error}\n{self.report()}") from error
        tally.add(tokens)

    def _check_ask(self, ask: Ask) -> int:
        tokens = ask.check(self.null.divergent, self.lossy)
        allowed = {
            End.BROKEN: ask.api in self.ended,
            End.REFUSED: self.refusals,
            End.FAILED: self.diverging and ask.code == "diverged",
        }
        assert ask.end is not None
        assert allowed.get(ask.end, True), f"it ended as {ask.end}: {ask.why or ask.code}"
        for index, heard in ask.heard.choices.items():
            self._check_log(ask, f"{ask.id}/{index}", heard.ids)
        return tokens

    def _check_log(self, ask: Ask, job: str, heard: list[int]) -> None:
        """What was heard is what stands."""
        if self.lossy and (self.diverging or ask.end is not End.WHOLE):
            return  # a job that came back after its client's end has gone another way since
        log = self.read(job)
        if log is None:
            assert self.lossy, f"{job} is gone"
            return
        assert log.ids[: len(heard)] == heard, f"{job} has {log.ids}, its client heard {heard}"
        if ask.end is End.WHOLE:
            assert (log.reason, len(log.ids)) == ("length", ask.max_tokens)
        else:
            assert log.reason in ("length", "cancelled"), log.reason
        self._check_epochs(ask.prompt, log)

    def _check_epochs(self, prompt: Sequence[int], log: Log) -> None:
        """Each token of the log is that of its attempt. (A rebuilt log holds tokens of attempts before.)"""
        if self.lossy:
            if self.null.divergent:
                assert all(a <= b for a, b in zip(epochs_of(prompt, log.ids), log.epochs, strict=True))
            return
        chain = NullChain(prompt, WORDS)
        for seq, (token, epoch) in enumerate(zip(log.ids, log.epochs, strict=True)):
            assert chain.next(epoch if self.null.divergent else None) == token, f"token {seq} of epoch {epoch} is wrong"
            chain.push(token)
        if log.ids:  # by the model itself, once
            salt = log.epochs[-1] if self.null.divergent else None
            assert log.ids[-1] == null_token((*prompt, *log.ids[:-1]), salt, WORDS)

    def read(self, job: str) -> Log | None:
        """The log of an ended job; None when there is none. Its tokens are contiguous and it has one end."""
        entries: Any = self.redis.xrange(self.keys.log(job))
        if not entries:
            return None
        assert [b"f" in data for _, data in entries] == [False] * (len(entries) - 1) + [True], entries
        places = [text(entry).partition("-") for entry, _ in entries]
        assert [int(place[2]) for place in places] == list(range(len(entries)))
        ids = [int(data[b"t"]) for _, data in entries[:-1]]
        return Log(text(entries[-1][1][b"f"]), [int(place[0]) for place in places[:-1]], ids)

    def report(self) -> str:
        asks = self.traffic.asks if self.traffic else []
        kinds = {str(end): sum(ask.end is end for ask in asks) for end in (None, *End)}
        waiting = [(ask.shape, ask.id, len(ask.heard.frames)) for ask in asks if ask.end is None]
        return f"asks: {kinds}, open: {waiting}\n{self._queue_report()}\n{self.logs()}"

    def _queue_report(self) -> str:
        """Jobs that are not over, work streams and heartbeats."""
        try:
            jobs = [self.redis.hgetall(key) for key in self.redis.keys(self.keys.job("*"))]
            open_jobs = [{k: v for k, v in job.items() if k != b"spec"} for job in jobs if job[b"st"] != b"done"]
            streams = self.redis.keys(f"{self.keys.prefix}work:*")
            work = {name: (self.redis.xlen(name), self.redis.xinfo_groups(name)) for name in streams}
            return f"now: {self.now_ms()}, jobs: {open_jobs}\nwork: {work}\nworkers: {self.status()}"
        except RedisError as error:
            return f"no queue: {error}"

    def close(self) -> None:
        for process in self.processes:
            process.kill()  # so that every client's connection ends
        if self.traffic is not None:
            self.traffic.close()
        super().close()


@contextlib.contextmanager
def web_fleet(server: Server, **options: Any) -> Iterator[WebFleet]:
    """A fleet with clients over HTTP that leaves no process and no key. Counted as a case when it ends well."""
    with tempfile.TemporaryDirectory(prefix="web-") as folder:
        with ended(WebFleet(server, Path(folder), **{"times": WEB_TIMES, **options})) as fleet:
            yield fleet
        tally.add(cases=1)
