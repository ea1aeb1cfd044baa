"""What the person on call does with a running fleet, through the command line: look, cancel, preempt, drain, retry."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import re
import signal
import socket
import struct
import subprocess
import sys
import termios
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import orjson
import psutil
import pytest

from prelay.main import main
from prelay_queue.client import SyncQueue
from prelay_queue.scripts import text
from prelay_worker.config import Role
from tests.bed import http
from tests.bed.processes import NULL, Api, Fleet, fleet, until, until_ready
from tests.bed.servers import Server

SLOW = replace(NULL, step_ms=10)
TOKENS = 400

Told = Callable[..., str]


@pytest.fixture(scope="module")
def site(shared_server: Server, null_folder: Path) -> Iterator[tuple[Fleet, Api]]:
    """A prefill worker, a decode worker that a test may drain, and an API process."""
    with fleet(shared_server.settings(), null_folder) as found:
        found.worker(Role.PREFILL)
        found.worker(Role.DECODE, null=SLOW)
        api = found.api()
        until_ready(api.url)
        yield found, api


@pytest.fixture
def api(site: tuple[Fleet, Api]) -> Api:
    return site[1]


@pytest.fixture
def told(api: Api, capsys: pytest.CaptureFixture[str]) -> Told:
    """Run a command on the site, as it ends well; what it printed."""

    def run(*arguments: str) -> str:
        code = main([*arguments, "--url", api.url])
        said = capsys.readouterr()
        assert code == 0, said
        return said.out

    return run


class Stream:
    """A request that is read by a thread of its own. `id` is known when it has begun."""

    def __init__(self, api: Api) -> None:
        self._url = api.url
        self._begun = threading.Event()
        self.id = ""
        self.events: list[str] = []
        self._thread = threading.Thread(target=self._read)
        self._thread.start()
        assert self._begun.wait(20)

    def _read(self) -> None:
        body = {"model": "null", "prompt": "t1 t2 t3", "max_tokens": TOKENS, "stream": True, "ignore_eos": True}
        with httpx.Client(timeout=60) as client, client.stream("POST", f"{self._url}/v1/completions", json=body) as got:
            self.id = got.headers["x-request-id"]
            for line in got.iter_lines():
                if line.startswith("data: "):
                    self.events.append(line.removeprefix("data: "))
                    self._begun.set()

    def end(self) -> list[dict[str, Any]]:
        """Everything that came."""
        self._thread.join(60)
        assert self.events[-1] == "[DONE]"
        return [orjson.loads(event) for event in self.events[:-1]]


@pytest.fixture
def stream(api: Api) -> Iterator[Stream]:
    found = Stream(api)
    yield found
    http.post(f"{api.url}/admin/jobs/{found.id}/cancel")
    found.end()


def words(events: list[dict[str, Any]]) -> list[str]:
    return "".join(event["choices"][0]["text"] for event in events if event.get("choices")).split()


def test_a_request_is_listed_and_shown_without_its_text(stream: Stream, told: Told) -> None:
    assert f"{stream.id}/0" in told("jobs", "ls")
    assert f"{stream.id}/0" in told("jobs", "ls", "--state", "decode", "--class", "normal", "--worker", ":")
    assert stream.id not in told("jobs", "ls", "--class", "batch")
    shown = told("jobs", "show", f"{stream.id}/0")
    assert re.search(r"state\s+decode", shown)
    assert re.search(rf"max tokens\s+{TOKENS}", shown)
    found = told("jobs", "show", stream.id, "--json")
    assert orjson.loads(found)["choices"][0]["viewers"] == 1
    assert "t1 t2" not in shown + found


def test_a_preempted_request_goes_on_and_its_trace_tells_how(stream: Stream, told: Told) -> None:
    assert "asked " in told("jobs", "preempt", stream.id)
    until(lambda: "preempted" in told("trace", stream.id))
    assert len(words(stream.end())) == TOKENS
    trace = told("trace", stream.id)
    assert re.search(r"\+\S+ \S+\s+1\s+preempted\s+\d+\s+\S+\s+given\s+up:\s+admin", trace)
    assert re.search(r"\s2\s+queued\s+\d+\s+–\s+waits\s+for\s+prefill;\s+\d+\s+tokens\s+kept", trace)
    assert "1 restart; queued " in trace
    assert "ended: length" in trace
    assert "admin" in told("top", "--once")


def test_a_cancelled_request_ends_with_an_error_event(stream: Stream, told: Told) -> None:
    assert told("jobs", "cancel", stream.id) == f"{stream.id}: cancelled\n"
    assert stream.end()[-1]["error"]["code"] == "cancelled"
    assert told("jobs", "cancel", stream.id) == f"{stream.id}: was over already\n"


def test_a_drained_worker_ends_well_and_its_request_goes_on_elsewhere(
    site: tuple[Fleet, Api], stream: Stream, told: Told
) -> None:
    found, api = site
    before = next(each for each in found.processes if each.kind == Role.DECODE and each.code is None)
    found.worker(Role.DECODE, null=SLOW)
    said = told("drain", str(before.pid))
    assert re.search(rf":{before.pid}:\w+ \(decode\): asked to end\n.*: ended\n", said)
    assert before.wait() == 0
    assert len(words(stream.end())) == TOKENS
    assert before.pid not in [each["pid"] for each in http.get(f"{api.url}/admin/workers").json()["workers"]]
    assert "given up: drain" in told("trace", stream.id)


def test_a_dead_letter_is_tried_again_under_a_name_of_its_own(
    site: tuple[Fleet, Api], stream: Stream, told: Told
) -> None:
    entry = leave_letter(site[0], f"{stream.id}/0")
    assert re.search(rf"{entry}\s+\S+\s+{stream.id}/0\s+2 crashes\s+yes", told("dead", "ls"))
    request = re.search(r"runs as (\S+);", told("dead", "retry", entry))
    assert request is not None
    assert request[1] == f"{stream.id}-retry-{entry}"
    assert told("dead", "ls") == "0 dead letters\n"
    answer = http.get(f"{site[1].url}/v1/streams/{request[1]}", timeout=60).text
    events = [line.removeprefix("data: ") for line in answer.splitlines() if line.startswith("data: ")]
    assert events[-1] == "[DONE]"
    again = [orjson.loads(event) for event in events[:-1]]
    assert {event["id"] for event in again} == {request[1]}
    assert words(again) == words(stream.end())


def test_dead_letters_are_dropped_one_or_all(site: tuple[Fleet, Api], stream: Stream, told: Told) -> None:
    first, _, _ = (leave_letter(site[0], f"{stream.id}/0") for _ in range(3))
    assert told("dead", "drop", first) == f"{first}: dropped\n"
    assert told("dead", "drop", "--all").count(": dropped\n") == 2
    assert told("dead", "ls") == "0 dead letters\n"


def test_a_letter_without_its_job_cannot_be_tried_again(
    site: tuple[Fleet, Api], api: Api, stream: Stream, told: Told, capsys: pytest.CaptureFixture[str]
) -> None:
    entry = leave_letter(site[0], f"{stream.id}/0", spec="")
    assert main(["dead", "retry", entry, "--url", api.url]) == 1
    assert "its prompt was too long to be kept" in capsys.readouterr().err.replace("\n", " ")
    told("dead", "drop", entry)


def leave_letter(found: Fleet, job: str, **changes: str) -> str:
    """A dead letter as `reap` writes it, of a job that lives."""
    queue = SyncQueue(found.queue)
    spec, form = queue.redis.hmget(queue.keys.job(job), "spec", "vw")
    fields = {"id": job, "why": "2 crashes", "spec": text(spec), "vw": text(form)} | changes
    entry: Any = queue.redis.xadd(queue.keys.dead, fields)  # type: ignore[arg-type]
    queue.close()
    return text(entry)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("jobs show nobody", "request 'nobody' is not known"),
        ("jobs ls --state gone", "state must be queued or prefill"),
        ("jobs cancel nobody", "1 of 1 could not be done"),
        ("drain nobody", "no worker nobody has a heartbeat; there are "),
        ("drain", "name workers"),
        ("drain --role prefill x", "name workers"),
        ("drain --role cook", "--role cook: no such worker"),
        ("dead retry", "name dead letters"),
        ("dead drop 1-1 --all", "name dead letters"),
    ],
)
def test_what_cannot_be_done_is_said_in_a_line(
    api: Api, arguments: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*arguments.split(), "--url", api.url]) in (1, 2)
    assert words in capsys.readouterr().err


def test_a_server_that_is_not_there_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["top", "--url", "http://127.0.0.1:1"]) == 1
    assert "no server answers at http://127.0.0.1:1" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("query", "param"),
    [("limit=0", "limit"), ("limit=1001", "limit"), ("limit=x", "limit"), ("state=done", "state"), ("foo=1", "foo")],
)
def test_a_wrong_query_is_refused_by_its_name(api: Api, query: str, param: str) -> None:
    answer = http.get(f"{api.url}/admin/jobs?{query}")
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


def test_a_server_with_keys_wants_one_of_operators_too(
    site: tuple[Fleet, Api], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PRELAY_API_KEY", raising=False)
    url = site[0].api(api_keys=("sk-4711",)).url
    assert main(["jobs", "ls", "--url", url]) == 1
    assert "set PRELAY_API_KEY" in capsys.readouterr().err
    monkeypatch.setenv("PRELAY_API_KEY", "sk-4711")
    assert main(["jobs", "ls", "--url", url]) == 0


def test_from_another_address_the_admin_routes_are_closed_and_the_rest_is_open(site: tuple[Fleet, Api]) -> None:
    found = (each for addresses in psutil.net_if_addrs().values() for each in addresses)
    own = [each.address for each in found if each.family == socket.AF_INET]
    others = [address for address in own if not address.startswith("127.")]
    if not others:
        pytest.skip("this machine has no address but loopback")
    port = site[0].api(host="0.0.0.0").url.rpartition(":")[2]
    answer = http.get(f"http://{others[0]}:{port}/admin/workers")
    assert (answer.status_code, answer.json()["error"]["code"]) == (403, "admin_is_local")
    assert http.get(f"http://{others[0]}:{port}/v1/models").status_code == 200
    assert http.get(f"http://127.0.0.1:{port}/admin/workers").status_code == 200
    named = {"x-forwarded-for": "10.1.2.3"}  # by a proxy of this machine
    assert http.get(f"http://127.0.0.1:{port}/admin/workers", headers=named).status_code == 403


class Terminal:
    """A command in a terminal of so many columns, with everything that it wrote."""

    def __init__(self, columns: int, *arguments: str) -> None:
        self._fd, inner = pty.openpty()
        fcntl.ioctl(self._fd, termios.TIOCSWINSZ, struct.pack("HHHH", 30, columns, 0, 0))
        self.before = termios.tcgetattr(self._fd)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "prelay", *arguments], env=_environment(), preexec_fn=lambda: os.login_tty(inner)
        )
        os.close(inner)
        self.output = ""

    def read(self) -> str:
        """Wait for more; '' at the end."""
        with contextlib.suppress(OSError):  # the other side is closed
            more = os.read(self._fd, 65536).decode(errors="replace")
            self.output += more
            return more
        return ""

    def until(self, words: str) -> None:
        while words not in self.output:
            assert self.read(), self.output

    def press(self, key: str) -> None:
        os.write(self._fd, key.encode())

    def end(self) -> int:
        """Wait for the exit code. The terminal must be as it was."""
        while self.read():
            pass
        code = self.process.wait(20)
        assert termios.tcgetattr(self._fd) == self.before
        os.close(self._fd)
        return code


def _environment() -> dict[str, str]:
    dropped = ("COLUMNS", "LINES", "PRELAY_API_KEY")
    return {name: value for name, value in os.environ.items() if name not in dropped} | {"TERM": "xterm-256color"}


@pytest.mark.parametrize("how", ["q", "\x03", "SIGTERM"])
def test_top_leaves_the_terminal_as_it_was(api: Api, how: str) -> None:
    terminal = Terminal(80, "top", "--url", api.url)
    terminal.until("waits for")
    if how == "SIGTERM":
        terminal.process.send_signal(signal.SIGTERM)
    else:
        terminal.press(how)
    assert terminal.end() == 0
    assert terminal.output.count("\x1b[?1049h") == terminal.output.count("\x1b[?1049l") == 1
    assert terminal.output.rfind("\x1b[?25h") > terminal.output.rfind("\x1b[?25l")
    lines = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", terminal.output.replace("\x1b[H", "\n")).splitlines()
    assert any(line.startswith("prelay top · ") for line in lines)
    assert max(map(len, lines)) <= 80
