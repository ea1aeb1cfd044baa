"""What an operator may see and do: the fleet, its workers, jobs; cancel, preempt, drain."""

from __future__ import annotations

import asyncio
from typing import Any

from fastapi import APIRouter, Request
from redis.exceptions import RedisError
from starlette.responses import Response

from prelay_queue.client import translate

from ..fleet import read_fleet
from ..jobs import Job, history_as_dicts, list_jobs, read_request
from ..outcome import Failure
from ..overview import read_overview
from ..query import OF_JOBS, documented, wanted_jobs
from ..replies import failed, json_reply
from ..service import service_of

router = APIRouter(tags=["Admin"])

_NOT_FOUND: dict[int | str, dict[str, Any]] = {
    404: {"description": "No such request, or it ended more than five minutes ago."}
}
_NO_WORKER: dict[int | str, dict[str, Any]] = {404: {"description": "No worker of that name has a heartbeat."}}


@router.get("/admin/overview", summary="The fleet at one moment")
async def overview(request: Request) -> Response:
    """What waits by stage and class, what runs, who works, and which attempts were given up lately."""
    return json_reply(await read_overview(service_of(request).queue))


@router.get("/admin/workers", summary="List the workers")
async def workers(request: Request) -> Response:
    """Every worker with a heartbeat. `kv` counts blocks; `age_ms` is the heartbeat's age by the server's clock."""
    fleet = await read_fleet(service_of(request).queue)
    return json_reply({"workers": [worker.as_dict() for worker in fleet.workers]})


@router.post("/admin/workers/{worker}/drain", summary="Drain a worker", status_code=202, responses=_NO_WORKER)
async def drain(request: Request, worker: str) -> Response:
    """Ask a worker to give back what it has, and to end; its jobs go on elsewhere. Its heartbeat goes when it has.

    Whoever started the process decides whether it starts again: `prelay serve` does.
    """
    queue = service_of(request).queue
    found = [each for each in (await read_fleet(queue)).workers if each.data.get("id") == worker]
    if not found:
        return _no_worker(worker)
    try:
        key = queue.keys.control(worker)
        heard: Any = await queue.redis.xadd(key, {"c": b'{"op":"drain"}'}, maxlen=1000, nomkstream=True)
    except RedisError as error:
        raise translate(error) from None
    if heard is None:
        return _no_worker(worker)
    return json_reply({"id": worker, "role": found[0].role, "asked": True}, 202)


@router.get("/admin/jobs", summary="List the jobs that are not over", openapi_extra=documented(OF_JOBS))
async def jobs(request: Request) -> Response:
    """The oldest first. `matching` counts all that match, `whole` is false where not all jobs could be looked at."""
    listing = await list_jobs(service_of(request).queue, wanted_jobs(request.query_params))
    found = [{"id": job.id, **job.as_dict()} for job in listing.jobs]
    return json_reply({"jobs": found, "matching": listing.matching, "whole": listing.whole})


@router.get("/admin/jobs/{request_id}", summary="Look a request up", responses=_NOT_FOUND)
async def job(request: Request, request_id: str) -> Response:
    """The jobs of a request, one for each choice, and how each came where it is.

    Times are the queue server's, in milliseconds. `history` has the last 64 states.
    """
    choices = await read_request(service_of(request).queue, request_id)
    if not choices:
        return _unknown(request_id)
    return json_reply({"id": request_id, "choices": [_shown(choice) for choice in choices]})


@router.post("/admin/jobs/{request_id}/preempt", summary="Preempt a request", status_code=202, responses=_NOT_FOUND)
async def preempt(request: Request, request_id: str) -> Response:
    """Ask the workers that run it to give all its choices up now; the relay then starts them again.

    `asked` names the worker that was asked; it is null for a choice that no worker runs.
    """
    queue = service_of(request).queue
    choices = await read_request(queue, request_id)
    if not choices:
        return _unknown(request_id)
    told = []
    for choice in choices:
        state, asked, _ = await queue.run(queue.scripts.evict(choice.id))
        told.append({"index": choice.index, "state": state, "asked": asked or None})
    return json_reply({"id": request_id, "choices": told}, 202)


@router.post("/admin/jobs/{request_id}/cancel", summary="Cancel a request", responses=_NOT_FOUND)
async def cancel(request: Request, request_id: str) -> Response:
    """End all choices of a request, whoever watches them. `cancelled` is false for one that was over already."""
    queue = service_of(request).queue
    choices = await read_request(queue, request_id)
    if not choices:
        return _unknown(request_id)
    # Together: whoever reads the answer cancels the others too as soon as one has ended.
    answers = await asyncio.gather(*(queue.run(queue.scripts.cancel(choice.id, "")) for choice in choices))
    told = [
        {"index": choice.index, "cancelled": answer == "ended"} for choice, answer in zip(choices, answers, strict=True)
    ]
    return json_reply({"id": request_id, "choices": told})


def _shown(choice: Job) -> dict[str, Any]:
    return {"index": choice.index, **choice.as_dict(), "history": history_as_dicts(choice.history)}


def _unknown(request_id: str) -> Response:
    message = f"request {request_id[:100]!r} is not known: it never was, or it ended more than five minutes ago"
    return failed(Failure(404, message, "invalid_request_error", "request_not_found", "request_id"))


def _no_worker(worker: str) -> Response:
    message = f"no worker {worker[:100]!r} has a heartbeat; /admin/workers lists those that have"
    return failed(Failure(404, message, "invalid_request_error", "worker_not_found", "worker"))
