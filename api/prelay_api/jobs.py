"""Jobs as an operator sees them: where each one is, who has it, and how it came there. Never what was asked."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from redis.exceptions import RedisError

from prelay_queue.client import AsyncQueue, translate
from prelay_queue.history import Step, read_history
from prelay_queue.scripts import text
from prelay_queue.state import SWEPT_IN, State
from prelay_text.request import MAX_CHOICES

#: Jobs that one listing looks at.
MAX_LOOKED_AT = 20_000
#: Job hashes read in one round trip.
_AT_A_TIME = 500

_NUMBERS = {
    "epoch": "ep", "prompt_tokens": "pt", "tokens": "nx", "max_tokens": "mt", "preemptions": "pe", "crashes": "cr",
    "submitted_ms": "sub", "claimed_ms": "cl", "deadline_ms": "dl", "ended_ms": "end",
}  # fmt: skip
_WORDS = {
    "state": "st", "owner": "ow", "priority": "cls", "preempted_for": "why", "finish_reason": "fin", "error": "err",
}  # fmt: skip
_LISTED = (*_NUMBERS.values(), *_WORDS.values(), "at")


@dataclass(frozen=True, slots=True)
class Job:
    """One choice of a request. Times are the server's, in ms, 0 for none; words are '' for none."""

    id: str
    numbers: dict[str, int]
    words: dict[str, str]
    viewers: int
    history: tuple[Step, ...] = ()

    @property
    def index(self) -> int:
        return int(self.id.rpartition("/")[2])

    def as_dict(self) -> dict[str, Any]:
        words = {name: value or None for name, value in self.words.items()}
        return {**words, **self.numbers, "viewers": self.viewers}


@dataclass(frozen=True, slots=True)
class Wanted:
    """Which jobs that are not over are listed: of a state, a class, a worker (any part of its name); '' is any."""

    state: str = ""
    priority: str = ""
    worker: str = ""
    limit: int = 100

    def has(self, job: Job) -> bool:
        return (
            self.state in ("", job.words["state"])
            and self.priority in ("", job.words["priority"])
            and self.worker in job.words["owner"]
        )

    def indexes(self) -> Sequence[str]:
        """The swept indexes in which they are."""
        return [SWEPT_IN[State(self.state)]] if self.state else sorted(set(SWEPT_IN.values()))


@dataclass(frozen=True, slots=True)
class Listing:
    """The oldest of the jobs that match, how many match, and whether all jobs were looked at."""

    jobs: tuple[Job, ...]
    matching: int
    whole: bool


async def list_jobs(queue: AsyncQueue, wanted: Wanted) -> Listing:
    """The jobs that are not over. Raise QueueError."""
    try:
        ids: list[str] = []
        for index in wanted.indexes():
            ids += map(text, await queue.redis.zrange(f"{queue.keys.prefix}{index}", 0, MAX_LOOKED_AT))
        whole, ids = len(ids) <= MAX_LOOKED_AT, ids[:MAX_LOOKED_AT]
        found: list[Job] = []
        for start in range(0, len(ids), _AT_A_TIME):
            found += await _read(queue, ids[start : start + _AT_A_TIME], _LISTED)
    except RedisError as error:
        raise translate(error) from None
    matching = sorted(filter(wanted.has, found), key=lambda job: (job.numbers["submitted_ms"], job.id))
    return Listing(tuple(matching[: wanted.limit]), len(matching), whole)


async def read_request(queue: AsyncQueue, request_id: str) -> list[Job]:
    """The jobs of a request with their history, none if it is unknown. Raise QueueError."""
    ids = [f"{request_id}/{index}" for index in range(MAX_CHOICES)]
    try:
        return await _read(queue, ids, (*_LISTED, "tl"))
    except RedisError as error:
        raise translate(error) from None


async def _read(queue: AsyncQueue, ids: Sequence[str], fields: Sequence[str]) -> list[Job]:
    async with queue.redis.pipeline(transaction=False) as pipe:
        for job_id in ids:
            pipe.hmget(queue.keys.job(job_id), fields)
        found: list[Any] = await pipe.execute()
    rows = ({name: _text(value) for name, value in zip(fields, row, strict=True)} for row in found)
    return [_job(job_id, row) for job_id, row in zip(ids, rows, strict=True) if row["st"]]


def _text(value: Any) -> str:
    return "" if value is None else text(value)


def _job(job_id: str, row: dict[str, str]) -> Job:
    numbers = {name: int(row[field] or 0) for name, field in _NUMBERS.items()}
    words = {name: row[field] for name, field in _WORDS.items()}
    return Job(job_id, numbers, words, len(row["at"].split()), read_history(row.get("tl", "")))


def history_as_dicts(steps: Iterable[Step]) -> list[dict[str, Any]]:
    """For JSON: nobody, and no reason, are null."""
    return [
        {"ms": step.ms, "state": step.state, "epoch": step.epoch, "tokens": step.tokens}
        | {"worker": step.worker or None, "why": step.why or None}
        for step in steps
    ]
