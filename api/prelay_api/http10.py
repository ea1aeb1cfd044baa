"""Answers of no known length for HTTP/1.0, which knows no chunks: they end where the connection ends.

nginx speaks it to what it proxies unless told otherwise. uvicorn sends it chunks all the same, and a client that takes
it at its word finds their sizes in the text.
"""

from __future__ import annotations

from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle


def until_the_close(app: ASGIApp, cycle: RequestResponseCycle) -> ASGIApp:
    """The app, whose answer in `cycle` is sent without chunks. The connection is to be closed behind it."""

    async def serve(scope: Scope, receive: Receive, send: Send) -> None:
        endless = False

        async def send_plainly(message: Message) -> None:
            nonlocal endless
            if message["type"] == "http.response.start":
                endless = all(name.lower() != b"content-length" for name, _ in message.get("headers", ()))
                if endless:
                    cycle.chunked_encoding = False
            elif endless:
                cycle.expected_content_length = len(message.get("body", b""))  # of this part
            await send(message)

        await app(scope, receive, send_plainly)

    return serve
