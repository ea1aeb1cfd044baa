"""The scripts on a real server beside the double: both are asked, and must say and hold the same after every step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, TypeVar, TypeVarTuple

import orjson

from prelay_queue.scripts import Call, Claimed, Scripts
from tests.bed.double import server_ms
from tests.bed.double.data import Entry, Job
from tests.integration.queue_backend import DoubleBackend, Picture, ServerBackend
from tests.integration.queue_desk import Desk, check

R = TypeVar("R")
Values = TypeVarTuple("Values")

#: Two readings of one server time may lie this far apart: one side acts after the other.
CLOSE_MS = 20_000
TIMES = ("sub", "dl", "cl", "end")

#: An entry as each side named it: stream, entry id, job id.
Delivery = dict[Desk, tuple[str, str, str]]


class Pair:
    """Two desks that do everything together."""

    def __init__(self, server: ServerBackend) -> None:
        self._double = DoubleBackend(server.queue.settings)
        self._double.queue.clock = _Clock()
        self.real, self.double = Desk(server, checked=False), Desk(self._double, checked=False)
        self._seen: dict[Desk, dict[str, list[str]]] = {self.real: {}, self.double: {}}

    @property
    def scripts(self) -> Scripts:
        return self.real.scripts

    @property
    def jobs(self) -> dict[str, Job]:
        return self._double.queue.data.jobs

    def waits(self, cls: str) -> tuple[int, int]:
        """How many jobs, and prompt tokens, of a class wait."""
        return self._double.queue.data.waiting(cls)

    def both(self, ask: Callable[[Desk, *Values], R], *values: *Values) -> R:
        """Ask both; the answers must be the same, but for the moment."""
        real, double = ask(self.real, *values), ask(self.double, *values)
        assert _timeless(real) == _timeless(double), f"{real} is not {double}"
        return real

    def run(self, call: Call[R]) -> R:
        """Send the same call to both."""
        return self.both(lambda desk: desk.run(call))

    def each(self, do: Callable[[Desk, *Values], object], *values: *Values) -> None:
        """Do the same to both, where the answers say nothing."""
        do(self.real, *values)
        do(self.double, *values)

    def deliver(self, worker: str, stage: str) -> Delivery:
        found = {desk: desk.deliver(worker, stage) for desk in (self.real, self.double)}
        named = [(stream, self._name(desk, stream, entry), job) for desk, (stream, entry, job) in found.items()]
        assert named[0] == named[1]
        return found

    def take_over(self, worker: str, stage: str) -> list[Delivery]:
        """All that pends, handed to `worker`."""
        taken: list[Delivery] = []
        for stream in self.real.keys.work(stage):
            found = {desk: desk.backend.take_over(stream, worker) for desk in (self.real, self.double)}
            for real, double in zip(found[self.real], found[self.double], strict=True):
                assert self._name(self.real, stream, real[0]) == self._name(self.double, stream, double[0])
                entries = {self.real: real, self.double: double}
                taken.append({desk: (stream, entry, fields["id"]) for desk, (entry, fields) in entries.items()})
        return taken

    def waiting(self, job: str) -> Delivery:
        """The entry under which a job waits, as if it had been delivered."""
        found: Delivery = {}
        for desk in (self.real, self.double):
            fields = desk.fields(job)
            found[desk] = fields["sk"], fields["si"], job
            self._name(desk, fields["sk"], fields["si"])
        return found

    def keep(self) -> Callable[[], None]:
        """Remember everything; what is returned goes back to it on both sides."""
        ways_back = [desk.backend.keep() for desk in (self.real, self.double)]

        def go_back() -> None:
            for way in ways_back:
                way()

        return go_back

    def compare(self) -> Picture:
        """Everything that stands is the same, and as it must be. Return it."""
        real, double = self.real.look(), self.double.look()
        check(real, self.real.keys.prefix)
        plain = self._plain(self.real, real), self._plain(self.double, double)
        for what in plain[0]:
            assert plain[0][what] == plain[1][what], f"{what}: {plain[0][what]} is not {plain[1][what]}"
        times = dict(_times(real)), dict(_times(double))
        assert times[0].keys() == times[1].keys()
        far = {what: (ms, times[1][what]) for what, ms in times[0].items() if abs(ms - times[1][what]) > CLOSE_MS}
        assert not far, f"times of both sides: {far}"
        self._align(real, double)
        return real

    def _align(self, real: Picture, double: Picture) -> None:
        """Give the real indexes the double's scores: what is due comes in one order, on both sides and in any run."""
        for index, scores in double.scores.items():
            if index == "deadlines":
                continue  # each is the `dl` of its own side's job
            for member, ms in scores.items():
                if real.scores[index][member] != ms:
                    self.real.backend.set_score(index, member, ms)
                    real.scores[index][member] = ms

    def _name(self, desk: Desk, stream: str, entry: str) -> str:
        """Entry ids are moments of the server's clock: here the n-th entry seen of a stream is called n."""
        seen = self._seen[desk].setdefault(stream.removeprefix(desk.keys.prefix), [])
        if entry not in seen:
            seen.append(entry)
        return str(seen.index(entry))

    def _plain(self, desk: Desk, picture: Picture) -> dict[str, Any]:
        """What must be equal on both sides."""

        def entries(stream: str, found: list[Entry]) -> list[Entry]:
            return [(self._name(desk, stream, entry), _events(fields)) for entry, fields in found]

        streams = {stream: entries(stream, found) for stream, found in picture.streams.items()}
        groups = {
            stream: {self._name(desk, stream, entry): worker for entry, worker in pending.items()}
            for stream, (pending, _) in picture.groups.items()  # when an idle consumer begins differs among servers
        }
        jobs = {job: self._plain_fields(desk, fields) for job, fields in picture.jobs.items()}
        return {
            "jobs": jobs,
            "logs": picture.logs,
            "indexes": {index: set(scores) for index, scores in picture.scores.items()},
            "streams": streams,
            "groups": groups,
            "domains": picture.domains,
            "waiting": picture.waiting,
            "beats": set(picture.beats),
        }

    def _plain_fields(self, desk: Desk, fields: dict[str, str]) -> dict[str, str]:
        plain = {name: value for name, value in fields.items() if name not in TIMES}
        if "tl" in plain:
            plain["tl"] = "\n".join(line.partition(" ")[2] for line in plain["tl"].split("\n"))
        if "si" in plain:
            plain["si"] = self._name(desk, plain["sk"], plain["si"])
        if "ce" in plain:
            stream, entry = plain["ce"].split(" ")
            plain["ce"] = f"{stream} {self._name(desk, stream, entry)}"
        return plain


class _Clock:
    """Server time, never twice the same."""

    def __init__(self) -> None:
        self._last_ms = 0

    def __call__(self) -> int:
        self._last_ms = max(self._last_ms + 1, server_ms())
        return self._last_ms


def _events(fields: dict[str, str]) -> Any:
    """JSON is JSON, however it is spaced."""
    return {name: orjson.loads(value) if name in ("e", "c") else value for name, value in fields.items()}


def _timeless(answer: Any) -> Any:
    if isinstance(answer, Claimed) and answer.claim is not None:
        return answer.code, replace(answer.claim, submitted_ms=0, deadline_ms=0)
    return answer


def _times(picture: Picture) -> Iterator[tuple[str, int]]:
    for job, fields in picture.jobs.items():
        for name in TIMES:
            if name in fields:
                yield f"{name} of {job}", int(fields[name])
    for index, scores in picture.scores.items():
        for member, ms in scores.items():
            yield f"{member} in {index}", ms
    for name, ms in picture.left_ms.items():
        yield f"end of {name}", ms
