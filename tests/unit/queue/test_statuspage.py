"""The small server of a worker, and the health check that asks it."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Iterator

import httpx
import pytest

from prelay import health
from prelay_queue import statuspage


class Page:
    """A server whose answers the test decides."""

    def __init__(self) -> None:
        self.problems: list[str] = []
        self.server = statuspage.show("127.0.0.1", 0, lambda: b"prelay_build_info 1.0\n", lambda: self.problems)
        self.url = f"http://127.0.0.1:{self.server.server_port}"

    def get(self, path: str) -> httpx.Response:
        return httpx.get(self.url + path, trust_env=False)


@pytest.fixture
def page() -> Iterator[Page]:
    found = Page()
    yield found
    found.server.shutdown()
    found.server.server_close()


def test_it_shows_metrics_and_that_it_lives(page: Page) -> None:
    page.problems = ["whatever"]
    assert page.get("/metrics?name=x").text == "prelay_build_info 1.0\n"
    assert page.get("/metrics").headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    assert page.get("/health/live").json() == {"status": "alive"}


def test_it_is_ready_when_there_are_no_problems(page: Page) -> None:
    assert (page.get("/health/ready").status_code, page.get("/health").json()["status"]) == (200, "ready")
    page.problems = ["Redis does not answer"]
    reply = page.get("/health/ready")
    assert reply.status_code == 503
    assert reply.json() == {"status": "not ready", "reasons": ["Redis does not answer"]}


def test_other_paths_are_named_with_those_that_there_are(page: Page) -> None:
    reply = page.get("/admin")
    assert (reply.status_code, reply.json()["error"]) == (
        404, "/admin is not here: /metrics, /health/live, /health/ready",
    )  # fmt: skip


def test_a_client_that_says_nothing_or_goes_away_keeps_nobody_else_waiting(page: Page) -> None:
    with socket.create_connection(("127.0.0.1", page.server.server_port)) as silent:
        silent.send(b"GET /met")
        assert page.get("/health/live").status_code == 200
    assert page.get("/health/live").status_code == 200


def test_the_health_check_says_yes_no_and_why_not(page: Page, capsys: pytest.CaptureFixture[str]) -> None:
    url = f"{page.url}/health/ready"
    assert health.main([url]) == 0
    page.problems = ["the model loop has not moved for 5000 ms"]
    assert health.main([url]) == 1
    assert "has not moved for 5000 ms" in capsys.readouterr().out
    assert health.main(["http://127.0.0.1:1/health/ready"]) == 1
    assert "Connection refused" in capsys.readouterr().out
    assert health.main(["127.0.0.1:8000"]) == 1
    assert health.main([]) == 2


LIGHT = """
import runpy, sys
try:
    runpy.run_module("prelay.health", run_name="__main__")
except SystemExit as end:
    print(end.code, len(sys.modules), {"typer", "pydantic", "redis"} & set(sys.modules))
"""


def test_the_health_check_is_a_light_process(page: Page) -> None:
    command = [sys.executable, "-c", LIGHT, f"{page.url}/health/ready"]
    said = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout.splitlines()[-1]
    code, modules, heavy = said.split(maxsplit=2)
    assert (code, heavy) == ("0", "set()")
    assert int(modules) < 250
