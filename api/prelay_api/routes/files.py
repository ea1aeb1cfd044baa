"""/v1/files: what batches read, and what they give."""

from __future__ import annotations

from functools import partial
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from prelay_files.ids import is_file_id
from prelay_files.store import FileLimits

from ..batch_object import file_object, page_of
from ..body import check_encoding
from ..config import ApiConfig
from ..download import Download, wanted_range
from ..errors import BodyTooLarge
from ..outcome import CLOSING
from ..page_query import among, read_query, that_is, whole
from ..replies import failed, json_reply
from ..service import service_of
from ..threads import in_thread
from ..upload import MAX_FRAME_BYTES, PURPOSE, Upload, boundary_of

router = APIRouter(tags=["Files"])

#: Bytes of a body that are gathered before a thread parses and writes them.
_GATHERED = 256 * 1024
#: OpenAI's limit of one page.
MAX_PAGE = 10_000

_NULL = {"type": "null"}
_FILE = {
    "type": "object",
    "required": ["id", "object", "bytes", "created_at", "filename", "purpose", "status"],
    "properties": {
        "id": {"type": "string"},
        "object": {"const": "file"},
        "bytes": {"type": "integer"},
        "lines": {"type": "integer", "description": "Blank ones are counted too."},
        "created_at": {"type": "integer"},
        "expires_at": _NULL,
        "filename": {"type": "string"},
        "purpose": {"enum": ["batch", "batch_output"]},
        "status": {"const": "processed"},
        "status_details": _NULL,
    },
    "additionalProperties": False,
}
_FORM = {
    "type": "object",
    "required": ["file", "purpose"],
    "properties": {
        "file": {"type": "string", "format": "binary", "minLength": 1},
        "purpose": {"type": "string", "enum": [PURPOSE]},
    },
    "additionalProperties": False,
}
#: An id that may be absent.
ID = {"type": ["string", "null"]}
_DELETED = {
    "type": "object",
    "required": ["id", "object", "deleted"],
    "properties": {"id": {"type": "string"}, "object": {"const": "file"}, "deleted": {"const": True}},
}
_NO_FILE: dict[int | str, dict[str, Any]] = {404: {"description": "There is no such file."}}
_QUERY = {
    "after": (that_is("the id of a file", is_file_id), ""),
    "limit": (whole(1, MAX_PAGE), MAX_PAGE),
    "order": (among("asc", "desc"), "desc"),
    "purpose": (among("batch", "batch_output"), ""),
}


def list_of(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema of a page of these."""
    return {
        "type": "object",
        "required": ["object", "data", "first_id", "last_id", "has_more"],
        "properties": {
            "object": {"const": "list"},
            "data": {"type": "array", "items": schema},
            "first_id": ID,
            "last_id": ID,
            "has_more": {"type": "boolean"},
        },
    }


def answers(schema: dict[str, Any]) -> dict[int | str, dict[str, Any]]:
    return {200: {"description": "Done.", "content": {"application/json": {"schema": schema}}}}


def parameter(name: str, schema: dict[str, Any]) -> dict[str, Any]:
    return {"name": name, "in": "query", "required": False, "schema": schema}


@router.post(
    "/v1/files",
    summary="Upload a file",
    responses={**answers(_FILE), 413: {"description": "The file has more bytes than are taken."}},
    openapi_extra={"requestBody": {"required": True, "content": {"multipart/form-data": {"schema": _FORM}}}},
)
async def upload(request: Request) -> Response:
    """Store the requests of a batch, one JSON object a line.

    The lines themselves are read when the batch is run: one that is wrong has its error in the batch's error file.
    The file goes to the disk as it comes; an upload that is not completed leaves nothing.
    """
    service = service_of(request)
    if service.closing:
        return failed(CLOSING)
    store = service.batches.files
    check_encoding(request)
    taking = Upload(store, _limits(service.config), boundary_of(request.headers.get("content-type", "")))
    try:
        with service.transfers.one():
            await _feed(taking, request, service.config.max_file_bytes + MAX_FRAME_BYTES)
        file = await in_thread(taking.finish)
    finally:
        await in_thread(taking.abort)
    return json_reply(file_object(file))


@router.get(
    "/v1/files",
    summary="List the files",
    responses=answers(list_of(_FILE)),
    openapi_extra={
        "parameters": [
            parameter("after", {"type": "string", "pattern": "^file-[0-9a-f]{24}$"}),
            parameter("limit", {"type": "integer", "minimum": 1, "maximum": MAX_PAGE}),
            parameter("order", {"type": "string", "enum": ["asc", "desc"]}),
            parameter("purpose", {"type": "string", "enum": ["batch", "batch_output"]}),
        ]
    },
)
async def list_files(request: Request) -> Response:
    """Page by page, the newest first, or with `order=asc` the oldest: `after` is the last id of the page before."""
    store = service_of(request).batches.files
    query = read_query(request, _QUERY)
    look = partial(
        store.list,
        after=query["after"],
        limit=query["limit"] + 1,
        purpose=query["purpose"],
        newest_first=query["order"] == "desc",
    )
    found = await in_thread(look)
    return json_reply(page_of([file_object(file) for file in found], query["limit"]))


@router.get("/v1/files/{file_id}", summary="Look a file up", responses={**answers(_FILE), **_NO_FILE})
async def file_by_id(request: Request, file_id: str) -> Response:
    """Its size, name and purpose."""
    store = service_of(request).batches.files
    return json_reply(file_object(await in_thread(partial(store.get, file_id))))


@router.get(
    "/v1/files/{file_id}/content",
    summary="Read a file",
    responses={
        200: {"description": "The content.", "content": {"application/octet-stream": {}}},
        206: {"description": "A part of it.", "content": {"application/octet-stream": {}}},
        **_NO_FILE,
    },
    response_class=Response,
)
async def content(request: Request, file_id: str) -> Response:
    """Its bytes as they were sent, or as the batch wrote them. A `Range: bytes=N-` gives those from N on."""
    service = service_of(request)
    store = service.batches.files
    file = await in_thread(partial(store.get, file_id))
    part = wanted_range(request.headers.get("range"), file.bytes)
    opened = await in_thread(partial(store.open, file_id))
    return Download(file, opened, part, service.config.stall_s, service.transfers)


@router.delete(
    "/v1/files/{file_id}",
    summary="Delete a file",
    responses={**answers(_DELETED), **_NO_FILE, 409: {"description": "A batch that is not over reads it."}},
)
async def delete(request: Request, file_id: str) -> Response:
    """What batches made of it stays."""
    await service_of(request).batches.delete_file(file_id)
    return json_reply({"id": file_id, "object": "file", "deleted": True})


async def _feed(taking: Upload, request: Request, limit: int) -> None:
    """The whole body, in pieces. Raise BodyTooLarge as soon as it is known to be beyond `limit`, and as Upload does."""
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > limit:
        raise BodyTooLarge(f"the request body has {declared} bytes; at most {limit} are taken here")
    size, gathered = 0, bytearray()
    async for part in request.stream():
        size += len(part)
        if size > limit:
            raise BodyTooLarge(f"the request body has more than the {limit} bytes that are taken here")
        gathered += part
        if len(gathered) >= _GATHERED:
            await in_thread(partial(taking.feed, bytes(gathered)))
            gathered.clear()
    await in_thread(partial(taking.feed, bytes(gathered)))


def _limits(config: ApiConfig) -> FileLimits:
    return FileLimits(config.max_file_bytes, config.max_file_lines, config.max_line_bytes)
