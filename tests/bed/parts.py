"""Streams that a client leaves and goes on with: parts of one stream, put together again."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import httpx
import orjson

from .chain import Frame, Stream, read_frames

STREAMS = "/v1/streams/"
RESUMABLE = {"Prefer": "resumable"}


class _EnoughError(Exception):
    """The client has what it wanted of this part."""


@dataclass(slots=True)
class Part(Stream):
    """What a client heard before it left after `most` frames; -1: it stays to the end."""

    most: int = -1

    def take(self, frame: Frame) -> None:
        super(Part, self).take(frame)
        if len(self.frames) == self.most:
            raise _EnoughError

    @property
    def last_id(self) -> str:
        """What the client would send as Last-Event-ID."""
        return next(frame.id for frame in reversed(self.frames) if frame.id)


async def post_part(
    client: httpx.AsyncClient,
    path: str,
    body: dict[str, Any],
    most: int = -1,
    headers: dict[str, str] | None = None,
    found: Part | None = None,
) -> Part:
    """Post, read `most` frames, and hang up; or read until the server is gone. `found` grows meanwhile."""
    request = client.build_request("POST", path, json={"stream": True, **body}, headers=headers)
    return await _read(client, request, found or Part(most=most))


async def get_part(client: httpx.AsyncClient, request_id: str, last_id: str | None = None, most: int = -1) -> Part:
    """Go on with a stream, read `most` frames, and hang up."""
    headers = {} if last_id is None else {"Last-Event-ID": last_id}
    return await _read(client, client.build_request("GET", STREAMS + request_id, headers=headers), Part(most=most))


async def _read(client: httpx.AsyncClient, request: httpx.Request, found: Part) -> Part:
    response = await client.send(request, stream=True)
    try:
        found.status, found.headers = response.status_code, dict(response.headers)
        if response.status_code != 200:
            found.error = orjson.loads(await response.aread())["error"]
        else:
            await read_frames(response, found)
    except (_EnoughError, httpx.TransportError):
        pass
    finally:
        await response.aclose()
    return found


def joined(parts: Iterable[Stream]) -> Stream:
    """The parts as one stream, as a client puts them together."""
    whole = Stream()
    for part in parts:
        whole.status, whole.headers = part.status, part.headers
        for frame in part.frames:
            whole.take(frame)
    return whole
