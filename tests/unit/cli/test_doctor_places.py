"""The state directory and the port, as `prelay doctor` looks at them: it makes, locks and takes nothing."""

from __future__ import annotations

import fcntl
import json
import os
import socket
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from prelay.doctor.places import Port, State, look_at_files, look_at_port, look_at_state
from prelay.settings import Settings, load
from prelay.statedir import StateDir, holder, socket_path


def settings(root: Path, **more: str) -> Settings:
    return load({"state_dir": str(root), **more}, None)


def test_a_directory_that_is_not_there_is_fit_and_stays_away(tmp_path: Path) -> None:
    found = look_at_state(settings(tmp_path / "deep" / "state"))
    assert (found.problem, found.exists, found.is_running, found.free > 0) == ("", False, False, True)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_of_files_is_looked_at_and_not_made(tmp_path: Path) -> None:
    found = look_at_files(tmp_path / "deep" / "files")
    assert (found.problem, found.exists, found.free > 0) == ("", False, True)
    assert look_at_files(tmp_path).exists
    (tmp_path / "note").write_text("")
    assert look_at_files(tmp_path / "note" / "files").problem == f"{tmp_path / 'note'} is not a directory"
    assert list(tmp_path.iterdir()) == [tmp_path / "note"]


def test_one_that_is_in_use_says_by_whom_and_is_free_again_afterwards(tmp_path: Path) -> None:
    running = StateDir(tmp_path)
    (tmp_path / "lock").write_text("4711\n")
    assert look_at_state(settings(tmp_path)).holder == "4711"
    assert holder(tmp_path / "server" / "lock") is None
    running.close()
    found = look_at_state(settings(tmp_path))
    assert (found.exists, found.is_running, found.problem) == (True, False, "")
    StateDir(tmp_path).close()


def test_a_server_whose_supervisor_is_gone_is_seen(tmp_path: Path) -> None:
    state = StateDir(tmp_path)
    lock = state.open_server_lock()
    fcntl.flock(lock, fcntl.LOCK_EX)
    state.close()
    assert look_at_state(settings(tmp_path)).server_held
    os.close(lock)


def test_what_makes_it_unfit_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    assert look_at_state(settings(tmp_path / "file")).problem == f"{tmp_path / 'file'} is not a directory"
    assert look_at_state(settings(tmp_path / "file" / "x")).problem == f"{tmp_path / 'file'} is not a directory"
    (tmp_path / "server").mkdir(mode=0o755)
    assert "chmod 700" in look_at_state(settings(tmp_path)).problem
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / ("runtime" * 20)))
    assert "too long for a socket" in look_at_state(settings(tmp_path / ("long" * 30))).problem
    monkeypatch.setattr("prelay.doctor.places.os.access", lambda place, how: False)
    assert look_at_state(settings(tmp_path / "new")).problem == f"this user may not write {tmp_path}"


def test_with_a_url_it_is_not_even_looked_at(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    found = look_at_state(settings(tmp_path / "file", redis_url="redis://q"))
    assert found == State(tmp_path / "file", is_wanted=False)


def test_the_socket_of_a_long_path_is_found_where_a_start_puts_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/tmp")
    for root in (tmp_path, tmp_path / ("long" * 30)):
        before = socket_path(root)
        state = StateDir(root)
        assert state.socket == before
        state.close()
    assert not before.parent.exists(), "asking made nothing"


class Handler(BaseHTTPRequestHandler):
    answers: dict[str, Any]

    def do_GET(self) -> None:
        body = json.dumps(self.answers.get(self.path)).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
        pass


@pytest.fixture
def port() -> Iterator[int]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server.server_port
        server.shutdown()
        thread.join()


READY = {"/health/live": {"status": "alive"}, "/health/ready": {"status": "ready", "reasons": []}}


@pytest.mark.parametrize(
    ("answers", "verdict"),
    [(READY, "ready"), ({**READY, "/health/ready": []}, ""), ({**READY, "/health/live": None}, ""), ({}, "")],
)
def test_a_prelay_that_has_the_port_is_known_by_its_answers(
    port: int, answers: dict[str, Any], verdict: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Handler, "answers", answers, raising=False)
    chosen = settings(tmp_path / "none", port=str(port))
    found = look_at_port(chosen, look_at_state(chosen))
    assert "Address already in use" in found.problem
    assert found.answers == verdict
    assert look_at_port(chosen, State(tmp_path, True, holder="1")).is_ours


def test_a_port_that_is_free_is_just_that(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        free = listener.getsockname()[1]
    chosen = settings(tmp_path / "none", port=str(free))
    assert look_at_port(chosen, look_at_state(chosen)) == Port("127.0.0.1", free)
