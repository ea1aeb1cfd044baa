"""`prelay chat` against a small server that answers as told."""

from __future__ import annotations

import json
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

import pytest

from prelay import chat
from prelay.chat import Conversation, converse
from prelay.errors import CliError


class Fake(ThreadingHTTPServer):
    """Answers each chat with the next of `answers`: (status, body)."""

    daemon_threads = False

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.answers: list[tuple[int, bytes]] = []
        self.asked: list[dict[str, Any]] = []
        self.paths: list[str] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    server: Fake

    def do_GET(self) -> None:
        self.server.paths.append(self.path)
        self._send(200, b'{"data": [{"id": "first"}, {"id": "second"}]}')

    def do_POST(self) -> None:
        self.server.paths.append(self.path)
        self.server.asked.append(json.loads(self.rfile.read(int(self.headers["content-length"]))))
        self._send(*self.server.answers.pop(0))

    def _send(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
        pass


@pytest.fixture
def server() -> Iterator[Fake]:
    with Fake() as fake:
        thread = Thread(target=fake.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield fake
        fake.shutdown()
        thread.join()


def says(*parts: str) -> tuple[int, bytes]:
    chunks: list[dict[str, Any]] = [{"choices": [{"delta": {"role": "assistant"}}]}]
    chunks += [{"choices": [{"delta": {"content": part}}]} for part in parts]
    chunks += [{"choices": [{"delta": {}, "finish_reason": "stop"}]}, {"choices": [], "usage": {}}]
    lines = [f": waiting\nid: 1-{n}\ndata: {json.dumps(chunk)}\n\n" for n, chunk in enumerate(chunks)]
    return 200, "".join([*lines, "data: [DONE]\n\n"]).encode()


def type_in(monkeypatch: pytest.MonkeyPatch, *lines: str) -> None:
    waiting = iter(lines)

    def read(prompt: str = "") -> str:
        del prompt
        try:
            return next(waiting)
        except StopIteration:
            raise EOFError from None

    monkeypatch.setattr("builtins.input", read)


def test_one_question_gets_one_answer_of_the_first_model(server: Fake, capsys: pytest.CaptureFixture[str]) -> None:
    server.answers = [says("Hel", "lo.")]
    assert converse(Conversation(server.url, max_tokens=5, seed=7), "Hi?") == 0
    assert capsys.readouterr().out == "Hello.\n"
    (asked,) = server.asked
    assert asked["model"] == "first"
    assert asked["messages"] == [{"role": "user", "content": "Hi?"}]
    assert (asked["max_tokens"], asked["seed"], asked["stream"]) == (5, 7, True)


@pytest.mark.parametrize("tail", ["/", "/v1", "/v1/"])
def test_the_base_url_of_openais_clients_does_too(server: Fake, tail: str) -> None:
    server.answers = [says("Hello.")]
    assert converse(Conversation(server.url + tail), "Hi?") == 0
    assert server.paths == ["/v1/models", "/v1/chat/completions"]


def test_a_conversation_remembers_what_was_said_and_ends_at_exit(server: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    server.answers = [says("One."), says("Two.")]
    type_in(monkeypatch, "first", "", "second", "/exit", "never read")
    assert converse(Conversation(server.url, model="second", system="Be short."), None) == 0
    assert [message["content"] for message in server.asked[1]["messages"]] == ["Be short.", "first", "One.", "second"]
    assert server.asked[1]["model"] == "second"


def test_in_a_conversation_a_refusal_is_said_and_forgotten(
    server: Fake, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    server.answers = [(400, b'{"error": {"message": "max_tokens must be at least 1, not 0"}}'), says("Yes.")]
    type_in(monkeypatch, "bad", "good")
    assert converse(Conversation(server.url), None) == 0
    shown = capsys.readouterr()
    assert "prelay: max_tokens must be at least 1, not 0 (status 400)" in shown.err
    assert shown.out == "Yes.\n"
    assert server.asked[1]["messages"] == [{"role": "user", "content": "good"}]


def test_an_error_in_mid_stream_is_said(server: Fake) -> None:
    body = says("Hel")[1].replace(b"data: [DONE]\n\n", b'data: {"error": {"message": "no worker"}}\n\ndata: [DONE]\n\n')
    server.answers = [(200, body)]
    with pytest.raises(CliError, match="no worker"):
        converse(Conversation(server.url), "Hi?")


def test_a_stream_without_its_end_is_said(server: Fake) -> None:
    server.answers = [(200, says("Hel")[1].replace(b"data: [DONE]\n\n", b""))]
    with pytest.raises(CliError, match="closed the stream before its end"):
        converse(Conversation(server.url), "Hi?")


def test_ctrl_c_stops_the_answer_and_keeps_what_came(
    server: Fake, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: object) -> Iterator[str]:
        yield "Hel"
        raise KeyboardInterrupt

    monkeypatch.setattr(chat, "_stream", interrupted)
    conversation = Conversation(server.url)
    assert converse(conversation, "Hi?") == 130
    assert capsys.readouterr().out == "Hel [stopped]\n"
    assert conversation.messages[-1] == {"role": "assistant", "content": "Hel"}


def test_no_server_is_one_line() -> None:
    with pytest.raises(CliError, match=r"no server answers at http://127.0.0.1:1 .*; start one: prelay serve"):
        converse(Conversation("http://127.0.0.1:1"), "Hi?")


def test_a_server_that_is_no_api_is_one_line(server: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Handler, "do_GET", lambda self: self._send(200, b"<html>"))
    with pytest.raises(CliError, match="no OpenAI-style API"):
        converse(Conversation(server.url), "Hi?")
