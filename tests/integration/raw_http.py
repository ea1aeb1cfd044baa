"""HTTP byte by byte, for what no client library sends."""

from __future__ import annotations

import contextlib
import json
import socket
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit


@dataclass(frozen=True, slots=True)
class Answer:
    """One answer as it came. `body` is unchunked."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def error(self) -> dict[str, Any]:
        """OpenAI's error object; fails when the body is none."""
        found: dict[str, Any] = json.loads(self.body)["error"]
        assert set(found) == {"message", "type", "param", "code"}
        assert self.headers["content-type"] == "application/json"
        return found


class Connection:
    """One connection to a server, for one test."""

    def __init__(self, url: str, timeout_s: float = 15) -> None:
        at = urlsplit(url)
        self._sock = socket.create_connection((at.hostname, at.port), timeout_s)
        self._rest = b""

    def __enter__(self) -> Connection:
        return self

    def __exit__(self, *_: object) -> None:
        self._sock.close()

    def send(self, *parts: bytes) -> None:
        self._sock.sendall(b"".join(parts))

    def pour(self, parts: Iterable[bytes]) -> int:
        """Send until all is sent or the server takes no more; return how many parts were."""
        sent = 0
        with contextlib.suppress(ConnectionError):
            for part in parts:
                self._sock.sendall(part)
                sent += 1
        return sent

    def half_close(self) -> None:
        """Send no more, and go on reading."""
        self._sock.shutdown(socket.SHUT_WR)

    def answer(self) -> Answer:
        """Read the next answer."""
        head, _, self._rest = self._until(b"\r\n\r\n").partition(b"\r\n\r\n")
        first, *lines = head.decode().split("\r\n")
        headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
        status = int(first.split()[1])
        if status == 100:
            return Answer(status, headers, b"")
        if headers.get("transfer-encoding") == "chunked":
            return Answer(status, headers, self._chunks())
        size = int(headers["content-length"])
        while len(self._rest) < size:
            self._read()
        body, self._rest = self._rest[:size], self._rest[size:]
        return Answer(status, headers, body)

    def _chunks(self) -> bytes:
        found = b""
        while True:
            line, _, self._rest = self._until(b"\r\n").partition(b"\r\n")
            size = int(line, 16)
            while len(self._rest) < size + 2:
                self._read()
            found, self._rest = found + self._rest[:size], self._rest[size + 2 :]
            if not size:
                return found

    def until(self, words: bytes) -> bytes:
        """Read until this was seen, and return everything that was not read as an answer."""
        return self._until(words)

    def closed_after(self) -> float:
        """Wait for the server to close, and return how many seconds that took; what comes is kept."""
        begun = time.monotonic()
        with contextlib.suppress(ConnectionError):
            while self._read(at_end=True):
                pass
        return time.monotonic() - begun

    @property
    def unread(self) -> bytes:
        return self._rest

    def _until(self, words: bytes) -> bytes:
        while words not in self._rest:
            self._read()
        return self._rest

    def _read(self, at_end: bool = False) -> bool:
        data = self._sock.recv(65536)
        if not data and not at_end:
            raise AssertionError(f"the server closed the connection after {self._rest[:200]!r}")
        self._rest += data
        return bool(data)


def ask(url: str, *parts: bytes) -> Answer:
    """Send this on a connection of its own, and return the first answer."""
    with Connection(url) as connection:
        connection.send(*parts)
        return connection.answer()


def post(path: str, body: bytes, *lines: str) -> bytes:
    """A request with a body."""
    head = [f"POST {path} HTTP/1.1", "host: x", f"content-length: {len(body)}", *lines]
    return "\r\n".join(head).encode() + b"\r\n\r\n" + body


def get(path: str, *lines: str) -> bytes:
    return "\r\n".join([f"GET {path} HTTP/1.1", "host: x", *lines]).encode() + b"\r\n\r\n"
