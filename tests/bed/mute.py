"""A client that asks and then reads nothing, or hangs up: a bare socket."""

from __future__ import annotations

import socket
from typing import Any
from urllib.parse import urlsplit

import orjson


def ask(url: str, path: str, body: dict[str, Any], buffer_bytes: int = 0) -> socket.socket:
    """Post, and return the connection. `buffer_bytes`: what the system may take of the answer meanwhile."""
    raw, at = orjson.dumps(body), urlsplit(url)
    connection = socket.socket()
    if buffer_bytes:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer_bytes)
    connection.connect((at.hostname, at.port))
    connection.sendall(f"POST {path} HTTP/1.1\r\nhost: test\r\ncontent-length: {len(raw)}\r\n\r\n".encode() + raw)
    return connection
