"""`prelay bench serve`: load on a server that runs, Prelay's or another with OpenAI's completions."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx
import numpy as np

from ..errors import BadUsage
from . import facts, target
from .arrivals import arrivals
from .client import Manner
from .figures import QUANTILES, STATISTICS, Slo, quantiles, summary
from .goodput import ATTAINMENT, Search
from .load import Level, Load
from .output import Report, Sheet, Wanted, columns, deliver
from .plot import Panel
from .progress import Tell, progress
from .workload import Workload

#: Requests of a level, at least, and per request at a time, where nobody says how many.
FEWEST, PER_LANE = 32, 4
#: How long each rate is tried when a goodput is looked for and nobody says how long, seconds; longer where this
#: number of requests takes longer.
PROBE_S, PROBE_FEWEST = 60.0, 20
#: Keys of the generators, so that arrivals do not follow from what the prompts are made of.
_ARRIVALS = 1


@dataclass(frozen=True, slots=True)
class Plan:
    """What to send. One of `concurrency` (closed loop) and `rates` (open loop, requests a second) has values."""

    url: str
    manner: Manner
    workload: Workload
    concurrency: Sequence[int] = ()
    rates: Sequence[float] = ()
    burstiness: float = 1.0
    count: int | None = None
    duration_s: float | None = None
    warmup: int = 4
    slo: Slo | None = None
    find_goodput: bool = False
    seed: int = 0
    #: As the user wrote it, for the report.
    words: dict[str, Any] = field(default_factory=dict)
    #: Sent with every request, and never reported: a key.
    headers: dict[str, str] = field(default_factory=dict, repr=False)

    def check(self) -> None:
        """Raise BadUsage for what does not go together."""
        if self.concurrency and self.rates:
            raise BadUsage("--concurrency is a closed loop and --rate an open one: give one of them")
        if self.count is not None and self.duration_s is not None:
            raise BadUsage("--requests and --duration both say when a level ends: give one of them")
        if self.find_goodput and (self.slo is None or self.concurrency or len(self.rates) > 1):
            raise BadUsage("--find-goodput needs --slo, and takes one --rate to begin with, no --concurrency")


def run(plan: Plan, wanted: Wanted, notes: Sequence[str]) -> int:
    """Measure and report. Return 0, or 130 when it was interrupted, with what was measured until then.

    Raise CliError where there is no server.
    """
    plan.check()
    wanted.check()
    found = facts.begin(notes)
    about = target.describe(plan.url, plan.manner.model or None, plan.headers)
    with progress() as tell:
        session = _Session(plan, about["model"], tell)
        asyncio.run(session.run())
    facts.finish(found)
    data = {"bench": "serve", "facts": found, "server": about, "settings": plan.words, **session.results()}
    deliver(_report(data, session), wanted)
    return 130 if session.interrupted else 0


class _Session:
    """One run over all levels."""

    def __init__(self, plan: Plan, model: str, tell: Tell) -> None:
        self.plan, self._tell = plan, tell
        self._manner = Manner(model, plan.manner.temperature, plan.manner.ignore_eos, plan.manner.timeout_s)
        self.levels: list[tuple[float, Level]] = []
        self.search: Search | None = None
        self.interrupted = False

    async def run(self) -> None:
        async with self._load() as load:
            await self._warm_up(load)
            if self.plan.find_goodput:
                await self._find(load)
            elif self.plan.rates:
                for rate in self.plan.rates:
                    await self._open(load, rate)
            else:
                for streams in self.plan.concurrency:
                    await self._closed(load, streams)

    @contextlib.asynccontextmanager
    async def _load(self) -> AsyncIterator[Load]:
        """A client without limits of its own. The first Ctrl-C stops in order, the second at once."""
        stop, loop = asyncio.Event(), asyncio.get_running_loop()

        def on_signal() -> None:
            self.interrupted = True
            stop.set()
            for number in (signal.SIGINT, signal.SIGTERM):
                loop.remove_signal_handler(number)

        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, on_signal)
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        timeout = httpx.Timeout(None, connect=10)
        async with httpx.AsyncClient(
            base_url=self.plan.url, headers=self.plan.headers, limits=limits, timeout=timeout, trust_env=False
        ) as client:
            yield Load(client, self._manner, stop)

    async def _warm_up(self, load: Load) -> None:
        """Not counted, and not asked again: level 0 is its own."""
        if self.plan.warmup:
            self._tell("warm-up", 0, 0)
            lanes = min(self.plan.warmup, max(self.plan.concurrency, default=self.plan.warmup))
            await load.closed(self.plan.workload(0), lanes, count=self.plan.warmup)

    async def _closed(self, load: Load, streams: int) -> None:
        if self.interrupted:
            return
        count, duration_s = self.plan.count, self.plan.duration_s
        if count is None and duration_s is None:
            count = max(FEWEST, PER_LANE * streams)
        load.tell = lambda level: self._tell(f"{streams} at a time", len(level.samples), count or 0)
        asks = self.plan.workload(len(self.levels) + 1)
        self.levels.append((streams, await load.closed(asks, streams, count=count, duration_s=duration_s)))

    async def _open(self, load: Load, rate: float, *, probe: bool = False) -> None:
        if self.interrupted:
            return
        number = len(self.levels) + 1
        times = self._times(rate, number)
        load.tell = lambda level: self._tell(f"{rate:.4g} requests/s", len(level.samples), len(times))
        slo, most = self.plan.slo, (1 - ATTAINMENT) * len(times)

        def hopeless(level: Level) -> bool:
            """Too many have missed already, whatever comes."""
            return probe and slo is not None and sum(not slo.met(s) for s in level.samples) > most

        self.levels.append((rate, await load.open(self.plan.workload(number), times, hopeless)))

    def _times(self, rate: float, number: int) -> list[float]:
        rng = np.random.default_rng([self.plan.seed, number, _ARRIVALS])
        count, duration_s = self.plan.count, self.plan.duration_s
        if count is None and self.plan.find_goodput:
            duration_s = max(duration_s or PROBE_S, PROBE_FEWEST / rate)
        elif count is None and duration_s is None:
            count = FEWEST
        return arrivals(rate, self.plan.burstiness, rng, count=count, duration_s=duration_s)

    async def _find(self, load: Load) -> None:
        slo = self.plan.slo
        assert slo is not None, "check saw to it"
        self.search = Search(self.plan.rates[0] if self.plan.rates else 1.0)
        while not self.search.done and not self.interrupted:
            await self._open(load, self.search.rate, probe=True)
            _, level = self.levels[-1]
            if not self.interrupted:
                self.search.tell(not level.stopped and slo.attainment(level.samples) >= ATTAINMENT)

    def results(self) -> dict[str, Any]:
        levels = [self._result(value, level) for value, level in self.levels]
        loop = "closed" if self.plan.concurrency else "open"
        found: dict[str, Any] = {"loop": loop, "levels": levels, "interrupted": self.interrupted}
        if self.search is not None:
            found["goodput"] = {
                "requests_per_s": round(self.search.low, 4),
                "attainment": ATTAINMENT,
                "slo_ms": self.plan.slo.targets if self.plan.slo else {},
                "settled": self.search.done and self.search.bounded,
                "too_much": round(self.search.high, 4) if self.search.bounded else None,
            }
        return found

    def _result(self, value: float, level: Level) -> dict[str, Any]:
        how = {"concurrency": value} if self.plan.concurrency else {"rate": round(value, 4)}
        late = {} if self.plan.concurrency else {"sent_late_ms": quantiles(level.lateness)}
        stopped = {"stopped_early": level.stopped, "dropped": level.dropped}
        return how | summary(level.samples, level.wall_s, self.plan.slo) | late | stopped


def _report(data: dict[str, Any], session: _Session) -> Report:
    server = data["server"]
    words = [f"{name} {server[name]}" for name in ("mode", "dtype", "threads", "exact") if server[name] is not None]
    words += [server["queue_server"]] if server["queue_server"] else []
    title = ", ".join([f"prelay bench serve: {server['model']} at {server['url']}", *words])
    return Report(title, data, lambda: list(_sheets(data)), lambda: _panels(data, session))


def _sheets(data: dict[str, Any]) -> Iterator[Sheet]:
    key = "concurrency" if data["loop"] == "closed" else "rate"
    has_slo = any("attainment" in level for level in data["levels"])
    headings = [key, "ok", "failed", "req/s", "tok/s in", "cached", "tok/s out", *(["met"] if has_slo else [])]
    rows, latencies, failures = [], [], []
    for level in data["levels"]:
        numbers = [level["ok"], level["failed"], level["requests_per_s"]]
        cached = level["tokens_cached"] / max(1, level["tokens_in"])
        numbers += [level["tokens_in_per_s"], f"{cached:.0%}", level["tokens_out_per_s"]]
        rows.append([level[key], *numbers, *([f"{level['attainment']:.1%}"] if has_slo else [])])
        latencies += [
            [level[key] if name == "ttft" else "", name.upper(), *columns(level[f"{name}_ms"], *STATISTICS)]
            for name in ("ttft", "tpot", "itl", "e2e")
        ]
        failures += [(level[key], count, why) for why, count in list(level["failures"].items())[:5]]
    yield "", headings, rows
    yield "", [key, "ms", *STATISTICS], latencies
    if failures:
        yield "failures", [key, "times", "why"], failures
    if goodput := data.get("goodput"):
        yield (
            "",
            ["goodput, requests/s", "too much", "settled"],
            [[goodput["requests_per_s"], goodput["too_much"], "yes" if goodput["settled"] else "no"]],
        )


def _panels(data: dict[str, Any], session: _Session) -> list[Panel]:
    """Percentiles over the levels; of a single level how its requests are spread."""
    if len(data["levels"]) == 1:
        return _spreads(session.levels[0][1])
    closed = data["loop"] == "closed"
    key, x = ("concurrency", "requests at a time") if closed else ("rate", "requests a second")
    levels = sorted(data["levels"], key=lambda level: float(level[key]))

    def lines(name: str) -> list[tuple[str, list[tuple[float, float]]]]:
        return [
            (f"p{q}", [(level[key], level[f"{name}_ms"][f"p{q}"]) for level in levels if level[f"{name}_ms"]])
            for q in QUANTILES
        ]

    rates = [(level[key], level["tokens_out_per_s"]) for level in levels]
    met = [(level[key], 100 * level["attainment"]) for level in levels if "attainment" in level]
    targets = Panel("requests that met their targets", x, "%", [("met", met)], even=closed)
    return [
        Panel("time to first token (TTFT)", x, "milliseconds", lines("ttft"), even=closed),
        Panel("time per output token (TPOT)", x, "milliseconds", lines("tpot"), even=closed),
        Panel("throughput", x, "output tokens a second", [("all requests", rates)], even=closed),
        *([targets] if met else []),
    ]


def _spreads(level: Level) -> list[Panel]:
    good = [sample for sample in level.samples if sample.ok]
    kinds = {
        "time to first token (TTFT)": [sample.ttft for sample in good],
        "time per output token (TPOT)": [sample.tpot for sample in good if sample.tpot is not None],
    }
    return [
        Panel(title, "milliseconds", "share of requests, %", [("requests", _spread(seconds))])
        for title, seconds in kinds.items()
    ]


def _spread(seconds: Sequence[float]) -> list[tuple[float, float]]:
    """The share of the values that is no larger than each."""
    return [(1000 * value, 100 * (n + 1) / len(seconds)) for n, value in enumerate(sorted(seconds))]
