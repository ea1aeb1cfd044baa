"""A file on its way out: read as the client takes it."""

from __future__ import annotations

import asyncio
import logging
import re
from functools import partial
from typing import BinaryIO
from urllib.parse import quote

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from prelay_files.store import StoredFile
from prelay_text.errors import RequestError

from .errors import Closing
from .threads import in_thread
from .transfers import Transfers

log = logging.getLogger("prelay.files")

#: Bytes that are read and sent at a time.
PIECE = 256 * 1024
_RANGE = re.compile(r"bytes=([0-9]{1,18})-([0-9]{0,18})")


def wanted_range(header: str | None, size: int) -> range | None:
    """The bytes that a Range header asks for; None: all, also for ranges of other kinds, as HTTP allows.

    Raise RequestError, 416, for one that begins behind the end.
    """
    found = _RANGE.fullmatch(header.strip()) if header else None
    if found is None:
        return None
    begin, end = int(found[1]), min(int(found[2] or size), size - 1)
    if begin >= size:
        message = f"range must begin before byte {size}, the file's end, not at {begin}"
        raise RequestError(message, param="range", code="invalid_range", status=416)
    return range(begin, end + 1) if begin <= end else None


class Download(Response):
    """Sends an open file, or a part of it, and closes it.

    A client that takes nothing for `stall_s` is cut off, and so are all when the process stops: they miss the rest.
    """

    media_type = "application/octet-stream"

    def __init__(
        self, file: StoredFile, content: BinaryIO, part: range | None, stall_s: float, transfers: Transfers
    ) -> None:
        name = quote(file.filename, safe="")
        place = {} if part is None else {"content-range": f"bytes {part.start}-{part.stop - 1}/{file.bytes}"}
        disposition = f"attachment; filename*=UTF-8''{name}"
        headers = {"content-disposition": disposition, "accept-ranges": "bytes", **place}
        super().__init__(status_code=200 if part is None else 206, headers=headers)
        self._part = range(file.bytes) if part is None else part
        self.headers["content-length"] = str(len(self._part))
        self._content, self._stall_s, self._transfers = content, stall_s, transfers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002 - ASGI
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            with self._transfers.one():
                await self._send_part(send)
        except TimeoutError:
            log.warning("a client took nothing for %g s: its download is cut", self._stall_s)
            return
        except Closing:
            return
        finally:
            self._content.close()
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _send_part(self, send: Send) -> None:
        self._content.seek(self._part.start)
        left = len(self._part)
        while left and (piece := await in_thread(partial(self._content.read, min(left, PIECE)))):
            left -= len(piece)
            async with asyncio.timeout(self._stall_s):
                await send({"type": "http.response.body", "body": piece, "more_body": True})
