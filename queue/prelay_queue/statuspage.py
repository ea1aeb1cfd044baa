"""A worker's small web server: its metrics, and whether it is ready. For Prometheus and for health checks."""

from __future__ import annotations

import logging
import socket
import socketserver
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import orjson

log = logging.getLogger("prelay.status")

#: A client that is silent for so long is let go, seconds.
PATIENCE_S = 10.0

#: Why this process does not work just now; empty when it does.
Problems = Callable[[], list[str]]


def show(host: str, port: int, metrics: Callable[[], bytes], problems: Problems) -> ThreadingHTTPServer:
    """Answer GET /metrics, /health/live and /health/ready from threads of its own; both functions are called in those.

    Raise OSError when it cannot listen there.
    """
    server = _server_on(host, port, metrics, problems)
    threading.Thread(target=server.serve_forever, name="status", daemon=True).start()
    return server


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    metrics: Callable[[], bytes]
    problems: Problems

    def server_bind(self) -> None:
        """As TCPServer does it: HTTPServer asks a name server for the name of this host."""
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])

    def handle_error(self, request: Any, client_address: Any) -> None:
        del request
        log.debug("a client of the status page, %s, went away", client_address, exc_info=True)


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    timeout = PATIENCE_S

    def do_GET(self) -> None:
        match self.path.partition("?")[0]:
            case "/metrics":
                self._reply(200, self.server.metrics(), "text/plain; version=0.0.4; charset=utf-8")
            case "/health/live":
                self._tell(200, {"status": "alive"})
            case "/health/ready" | "/health":
                reasons = self.server.problems()
                self._tell(503 if reasons else 200, {"status": "not ready" if reasons else "ready", "reasons": reasons})
            case path:
                self._tell(404, {"error": f"{path[:100]} is not here: /metrics, /health/live, /health/ready"})

    def _tell(self, status: int, body: dict[str, Any]) -> None:
        self._reply(status, orjson.dumps(body), "application/json")

    def _reply(self, status: int, body: bytes, kind: str) -> None:
        self.send_response(status)
        self.send_header("content-type", kind)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        """A line for each scrape is noise."""


def _server_on(host: str, port: int, metrics: Callable[[], bytes], problems: Problems) -> _Server:
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    kind = type("_Server", (_Server,), {"address_family": family})
    server: _Server = kind(address[:2], _Handler)
    server.metrics, server.problems = metrics, problems
    return server
