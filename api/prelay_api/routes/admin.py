"""What an operator may see and do: workers, jobs, a preempt on demand."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fastapi import APIRouter, Request
from redis.exceptions import RedisError
from starlette.responses import Response

from prelay_queue.client import AsyncQueue, translate
from prelay_queue.scripts import text
from prelay_queue.state import State
from prelay_text.request import MAX_CHOICES

from ..fleet import read_fleet
from ..outcome import Failure
from ..replies import failed, json_reply
from ..service import service_of

router = APIRouter(tags=["Admin"])

_RUNNING = (State.PREFILL, State.STAGED, State.ADOPTING, State.DECODE)
_NUMBERS = {
    "epoch": "ep", "prompt_tokens": "pt", "tokens": "nx", "max_tokens": "mt", "preemptions": "pe", "crashes": "cr",
    "submitted_ms": "sub", "deadline_ms": "dl", "ended_ms": "end",
}  # fmt: skip
_WORDS = {
    "state": "st", "owner": "ow", "priority": "cls", "preempted_for": "why", "finish_reason": "fin", "error": "err",
}  # fmt: skip
_NOT_FOUND: dict[int | str, dict[str, Any]] = {
    404: {"description": "No such request, or it ended more than five minutes ago."}
}


@router.get("/admin/workers", summary="List the workers")
async def workers(request: Request) -> Response:
    """Every worker with a heartbeat. `kv` counts blocks; `age_ms` is the heartbeat's age by the server's clock."""
    fleet = await read_fleet(service_of(request).queue)
    return json_reply({"workers": [worker.as_dict() for worker in fleet.workers]})


@router.get("/admin/jobs/{request_id}", summary="Look a request up", responses=_NOT_FOUND)
async def job(request: Request, request_id: str) -> Response:
    """The jobs of a request, one for each choice. Times are the queue server's, in milliseconds."""
    choices = await _choices(service_of(request).queue, request_id)
    if not choices:
        return _unknown(request_id)
    return json_reply({"id": request_id, "choices": [choice.as_dict() for choice in choices]})


@router.post("/admin/jobs/{request_id}/preempt", summary="Preempt a request", status_code=202, responses=_NOT_FOUND)
async def preempt(request: Request, request_id: str) -> Response:
    """Ask the workers that run it to give all its choices up now; the relay then starts them again.

    `asked` names the worker that was asked; it is null for a choice that no worker runs.
    """
    queue = service_of(request).queue
    choices = await _choices(queue, request_id)
    if not choices:
        return _unknown(request_id)
    told = []
    for choice in choices:
        state, asked, _ = await queue.run(queue.scripts.evict(f"{request_id}/{choice.index}"))
        told.append({"index": choice.index, "state": state, "asked": asked or None})
    return json_reply({"id": request_id, "choices": told}, 202)


@dataclass(frozen=True, slots=True)
class _Choice:
    index: int
    numbers: dict[str, int]
    words: dict[str, str]
    viewers: int

    @property
    def state(self) -> str:
        return self.words["state"]

    def as_dict(self) -> dict[str, Any]:
        words: dict[str, Any] = {name: value or None for name, value in self.words.items()}
        return {"index": self.index, **words, **self.numbers, "viewers": self.viewers}


async def _choices(queue: AsyncQueue, request_id: str) -> list[_Choice]:
    """Read the jobs of a request. Raise QueueError."""
    fields = [*_NUMBERS.values(), *_WORDS.values(), "at"]
    try:
        async with queue.redis.pipeline(transaction=False) as pipe:
            for index in range(MAX_CHOICES):
                pipe.hmget(queue.keys.job(f"{request_id}/{index}"), fields)
            found = await pipe.execute()
    except RedisError as error:
        raise translate(error) from None
    read = (dict(zip(fields, (text(v) if v is not None else "" for v in row), strict=True)) for row in found)
    return [_choice(index, row) for index, row in enumerate(read) if row["st"]]


def _choice(index: int, row: dict[str, str]) -> _Choice:
    numbers = {name: int(row[field] or 0) for name, field in _NUMBERS.items()}
    words = {name: row[field] for name, field in _WORDS.items()}
    return _Choice(index, numbers, words, len(row["at"].split()))


def _unknown(request_id: str) -> Response:
    message = f"request {request_id[:100]!r} is not known: it never was, or it ended more than five minutes ago"
    return failed(Failure(404, message, "invalid_request_error", "request_not_found", "request_id"))
