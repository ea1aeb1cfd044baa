"""A server of files and batches that answers as OpenAI documents it, as fast as told, and fails where told."""

from __future__ import annotations

import json
import re
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any
from urllib.parse import parse_qs, urlsplit

#: What happens instead of an answer: the connection closes before or after the work was done, or a status comes.
DROP, LOSE = "drop", "lose"


class BatchStub(ThreadingHTTPServer):
    """`step` lines end at each look at a batch; those whose custom id is in `bad` fail. `faults` by method and path."""

    daemon_threads = False

    def __init__(self, step: int = 1000, port: int = 0) -> None:
        super().__init__(("127.0.0.1", port), _Handler)
        self.lock = threading.Lock()
        self.step, self.bad, self.end = step, set[str](), "completed"
        self.files: dict[str, bytes] = {}
        self.batches: dict[str, dict[str, Any]] = {}
        self.faults: dict[str, list[str | tuple[int, dict[str, str]]]] = {}
        self.asked: list[str] = []
        self.keys: set[str | None] = set()
        #: How often the content of a file breaks off, and after how many bytes.
        self.cuts, self.cut_after = 0, 1000
        self.knows_ranges = True
        self.errors: list[dict[str, Any]] = []
        self._number = 0
        self.connections: set[socket.socket] = set()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that goes away in the middle is what these tests are about."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)

    def new_id(self, kind: str) -> str:
        self._number += 1
        return f"{kind}{self._number:024x}"

    def lines(self, batch: dict[str, Any]) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.files[batch["input_file_id"]].splitlines() if line.strip()]

    def create(self, asked: dict[str, Any]) -> dict[str, Any]:
        batch = {
            "id": self.new_id("batch_"), "object": "batch", "status": "validating", "endpoint": asked["endpoint"],
            "input_file_id": asked["input_file_id"], "completion_window": asked["completion_window"],
            "created_at": int(time.time()), "metadata": asked.get("metadata"), "output_file_id": None,
            "error_file_id": None, "errors": None, "request_counts": {"total": 0, "completed": 0, "failed": 0},
        }  # fmt: skip
        self.batches[batch["id"]] = batch
        return batch

    def advance(self, batch: dict[str, Any]) -> None:
        """Let some lines end; at the last write both files."""
        if batch["status"] not in ("validating", "in_progress", "cancelling"):
            return
        lines = self.lines(batch)
        counts = batch["request_counts"]
        ended = counts["completed"] + counts["failed"]
        over = batch["status"] == "cancelling" or (self.end != "completed" and ended)
        batch["status"], counts["total"] = "in_progress", len(lines)
        upto = ended if over else min(len(lines), ended + self.step)
        good = [n for n, line in enumerate(lines[:upto]) if line["custom_id"] not in self.bad]
        counts["completed"], counts["failed"] = len(good), upto - len(good)
        batch["usage"] = {"input_tokens": upto, "output_tokens": 8 * upto, "total_tokens": 9 * upto}
        if not over and upto < len(lines):
            return
        counts["failed"] = len(lines) - len(good)
        batch["status"] = "cancelled" if over and self.end == "completed" else self.end
        batch[f"{batch['status']}_at"] = int(time.time())
        batch["errors"] = {"object": "list", "data": self.errors} if self.errors else None
        if batch["status"] != "failed":
            self.store(batch, "output_file_id", [_result(batch["id"], n, lines[n]) for n in reversed(good)])
            bad = sorted(set(range(len(lines))) - set(good))
            self.store(batch, "error_file_id", [_refusal(batch["id"], n, lines[n]) for n in reversed(bad)])

    def store(self, batch: dict[str, Any], name: str, results: list[dict[str, Any]]) -> None:
        if results:
            batch[name] = self.new_id("file-")
            self.files[batch[name]] = "".join(json.dumps(each) + "\n" for each in results).encode()


def _result(batch_id: str, number: int, line: dict[str, Any]) -> dict[str, Any]:
    body = line["body"]
    said = body.get("prompt") or body["messages"][-1]["content"]
    return {
        "id": f"batch_req_{batch_id.removeprefix('batch_')}_{number}",
        "custom_id": line["custom_id"],
        "response": {"status_code": 200, "request_id": f"r-{number}", "body": {"said": said}},
        "error": None,
    }


def _refusal(batch_id: str, number: int, line: dict[str, Any]) -> dict[str, Any]:
    result = _result(batch_id, number, line)
    return result | {"response": None, "error": {"code": "bad", "message": "it is bad"}}


class _Handler(BaseHTTPRequestHandler):
    server: BatchStub
    protocol_version = "HTTP/1.1"

    def setup(self) -> None:
        super().setup()
        self.server.connections.add(self.connection)

    def finish(self) -> None:
        self.server.connections.discard(self.connection)
        super().finish()

    def do_GET(self) -> None:
        self._answer()

    def do_POST(self) -> None:
        self._answer()

    def _answer(self) -> None:
        raw = self.rfile.read(int(self.headers.get("content-length", 0)))
        path, stub = urlsplit(self.path).path, self.server
        with stub.lock:
            asked = f"{self.command} {path}"
            stub.asked.append(asked)
            stub.keys.add(self.headers.get("authorization"))
            planned = stub.faults.get(asked)
            fault = planned.pop(0) if planned else None
            if fault == DROP:
                return self._hang_up()
            if isinstance(fault, tuple):
                return self._send(fault[0], _error(f"status {fault[0]} as planned"), fault[1])
            status, body = self._work(path, raw)
        if fault == LOSE:
            return self._hang_up()
        if path.endswith("/content") and status == 200:
            return self._send_content(body)
        return self._send(status, body)

    def _work(self, path: str, raw: bytes) -> tuple[int, Any]:
        stub = self.server
        match [self.command, *path.strip("/").split("/")[1:]]:
            case ["GET", "models"]:
                return 200, {"data": [{"id": "first"}, {"id": "second"}]}
            case ["POST", "files"]:
                return 200, self._upload(raw)
            case ["GET", "files", name] if name in stub.files:
                return 200, {"id": name, "bytes": len(stub.files[name])}
            case ["GET", "files", name, "content"] if name in stub.files:
                return 200, stub.files[name]
            case ["POST", "batches"]:
                return 200, stub.create(json.loads(raw))
            case ["GET", "batches"]:
                return 200, self._page()
            case ["GET", "batches", name] if name in stub.batches:
                stub.advance(stub.batches[name])
                return 200, stub.batches[name]
            case ["POST", "batches", name, "cancel"] if name in stub.batches:
                if "output_file_id" in stub.batches[name] and stub.batches[name]["output_file_id"]:
                    return 409, _error("it is over")
                stub.batches[name]["status"] = "cancelling"
                return 200, stub.batches[name]
        return 404, _error(f"there is no {path}")

    def _upload(self, raw: bytes) -> dict[str, Any]:
        """Take the parts of a form apart."""
        mark = re.search(r"boundary=(\S+)", self.headers["content-type"])
        assert mark is not None
        parts = {}
        for part in raw.split(b"--" + mark[1].encode())[1:-1]:
            head, _, content = part.partition(b"\r\n\r\n")
            name = re.search(rb'name="([^"]*)"', head)
            assert name is not None
            parts[name[1].decode()] = content.removesuffix(b"\r\n")
        assert parts["purpose"] == b"batch"
        file_id = self.server.new_id("file-")
        self.server.files[file_id] = parts["file"]
        return {"id": file_id, "object": "file", "bytes": len(parts["file"]), "purpose": "batch"}

    def _page(self) -> dict[str, Any]:
        query = parse_qs(urlsplit(self.path).query)
        newest = list(reversed(self.server.batches.values()))
        after = [n for n, batch in enumerate(newest, 1) if batch["id"] == query.get("after", [""])[0]]
        begin, limit = (after or [0])[0], int(query["limit"][0])
        return {"object": "list", "data": newest[begin : begin + limit], "has_more": begin + limit < len(newest)}

    def _send_content(self, content: bytes) -> None:
        stub, place = self.server, 0
        wanted = re.fullmatch(r"bytes=(\d+)-", self.headers.get("range", ""))
        if wanted and stub.knows_ranges:
            place = int(wanted[1])
        self.send_response(206 if place else 200)
        self.send_header("content-length", str(len(content) - place))
        self.end_headers()
        rest = content[place:]
        if stub.cuts and len(rest) > stub.cut_after:
            stub.cuts -= 1
            self.wfile.write(rest[: stub.cut_after])
            return self._hang_up()
        self.wfile.write(rest)

    def _send(self, status: int, body: Any, headers: dict[str, str] | None = None) -> None:
        raw = json.dumps(body).encode()
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(raw)))
        self.end_headers()
        self.wfile.write(raw)

    def _hang_up(self) -> None:
        self.close_connection = True
        self.connection.shutdown(socket.SHUT_RDWR)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
        pass


def _error(message: str) -> dict[str, Any]:
    return {"error": {"message": message, "type": "invalid_request_error", "param": None, "code": None}}


@contextmanager
def batch_stub(step: int = 1000, port: int = 0) -> Iterator[BatchStub]:
    with BatchStub(step, port) as stub:
        thread = Thread(target=stub.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield stub
        finally:
            stub.shutdown()
            thread.join()
            for connection in list(stub.connections):  # those that are kept alive end with the server
                with suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)
