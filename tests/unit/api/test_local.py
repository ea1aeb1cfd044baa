"""Who may use the admin routes of a server without keys."""

from __future__ import annotations

import orjson
import pytest
from starlette.types import Message, Receive, Scope, Send

from prelay_api.local import LocalAdmin


async def _app(_: Scope, __: Receive, send: Send) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"{}"})


async def ask(client: str | None, path: str = "/admin/workers", **headers: str) -> tuple[int, dict[str, str]]:
    """The status and the error of a request from that address."""
    said: list[Message] = []

    async def send(message: Message) -> None:
        said.append(message)

    async def receive() -> Message:
        raise AssertionError("nobody reads the body")

    scope: Scope = {
        "type": "http", "path": path, "client": None if client is None else (client, 4711),
        "headers": [(name.encode(), value.encode("latin-1")) for name, value in headers.items()],
    }  # fmt: skip
    await LocalAdmin(_app)(scope, receive, send)
    body = orjson.loads(b"".join(message.get("body", b"") for message in said))
    return said[0]["status"], body.get("error", {})


@pytest.mark.parametrize("client", ["127.0.0.1", "127.0.1.1", "::1", "::ffff:127.0.0.1", None, ""])
async def test_whoever_asks_from_this_machine_may(client: str | None) -> None:
    assert await ask(client, host="127.0.0.1:8000") == (200, {})


@pytest.mark.parametrize("client", ["10.0.0.7", "192.168.1.9", "2001:db8::1", "fe80::1%eth0", "::ffff:10.0.0.7", "x"])
@pytest.mark.parametrize("path", ["/admin", "/admin/workers", "/admin/jobs/x/cancel"])
async def test_whoever_asks_from_elsewhere_is_told_what_to_do(client: str, path: str) -> None:
    status, error = await ask(client, path, host="127.0.0.1:8000")
    assert (status, error["type"], error["code"]) == (403, "invalid_request_error", "admin_is_local")
    assert "http://127.0.0.1" in error["message"]
    assert "PRELAY_API_KEY" in error["message"]


@pytest.mark.parametrize("path", ["/v1/models", "/health", "/administration", "/"])
async def test_everything_else_is_open_to_all(path: str) -> None:
    assert await ask("10.0.0.7", path, host="any.example") == (200, {})


@pytest.mark.parametrize("host", ["localhost", "localhost:8000", "LOCALHOST.", "box", "[::1]:80", "a.localhost", ""])
async def test_names_of_this_machine_are_its_own(host: str) -> None:
    assert await ask("127.0.0.1", host=host) == (200, {})


@pytest.mark.parametrize("host", ["evil.example", "evil.example:80", "127.0.0.1.evil.x", "10.0.0.7", "[", "a@b.c"])
async def test_a_page_whose_name_was_pointed_here_is_refused(host: str) -> None:
    status, error = await ask("127.0.0.1", host=host)
    assert (status, error["code"]) == (403, "admin_is_local")


@pytest.mark.parametrize("origin", ["https://evil.example", "null", "http://localhost:3000", "http://["])
async def test_a_form_of_another_page_is_refused(origin: str) -> None:
    assert (await ask("127.0.0.1", host="localhost:8000", origin=origin))[0] == 403


async def test_a_page_of_this_server_may_ask() -> None:
    assert (await ask("127.0.0.1", host="localhost:8000", origin="http://localhost:8000"))[0] == 200
