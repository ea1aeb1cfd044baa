"""The HTTP layer of the API under clients that no library is: what they get is an answer, and never a hang."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Iterator

import psutil
import pytest

from prelay_api.protocol import LINGER_S, MAX_HEAD_BYTES, MAX_HEAD_FIELDS, MAX_PIPELINED
from prelay_worker.config import NullModel, Role
from tests.bed import http
from tests.bed.processes import Api, Fleet, fleet, until, until_ready
from tests.bed.scripted import ScriptedWorker
from tests.bed.servers import Server
from tests.integration.raw_http import Connection, ask, get, post

LIVE = get("/health/live")
COMPLETIONS = "/v1/completions"

#: A time to send a request in that a test can wait for.
SHORT_S = 1.0


def completion(**more: object) -> bytes:
    return json.dumps({"model": "null", "prompt": [1, 2], "max_tokens": 50, **more}).encode()


@pytest.fixture(scope="module")
def hasty_api(shared_server: Server, null_folder: object) -> Iterator[Api]:
    """An API process that waits for no request longer than a second."""
    with fleet(shared_server.settings(), null_folder) as found:  # type: ignore[arg-type]
        yield found.api(body_timeout_s=SHORT_S)


@pytest.fixture(autouse=True)
def it_still_serves(request: pytest.FixtureRequest) -> Iterator[None]:
    """After each test: the next request is answered, and nothing failed inside."""
    yield
    for name in ("quiet_api", "hasty_api"):
        if name in request.fixturenames:
            api: Api = request.getfixturevalue(name)
            assert http.get(f"{api.url}/health/live", timeout=5).status_code == 200
            assert "Traceback" not in api.log


# --- heads


CHUNKED = post(COMPLETIONS, b"").replace(b"content-length: 0", b"transfer-encoding: chunked") + b"2\r\n{}\r\n"

#: The beginnings of requests that have no end, and what is sent for ever after.
ENDLESS = {
    "line": (b"GET /", b"a" * 4096),
    "name": (b"GET / HTTP/1.1\r\n", b"a" * 4096),
    "value": (b"GET / HTTP/1.1\r\nx: ", b"a" * 4096),
    "nothing": (b"", b"\r\n" * 2048),
    "trailer": (CHUNKED + b"0\r\nx: ", b"a" * 4096),
}


@pytest.mark.parametrize("kind", ENDLESS)
def test_a_request_without_an_end_is_a_431_long_before_it_fills_the_memory(quiet_api: Api, kind: str) -> None:
    process = psutil.Process(quiet_api.pid)
    with Connection(quiet_api.url) as connection:
        begin, more = ENDLESS[kind]
        connection.send(begin, more * 300)
        assert connection.answer().status == 431
    before = process.memory_info().rss
    with Connection(quiet_api.url) as connection:
        begun = time.monotonic()
        connection.pour(itertools.chain([begin], itertools.repeat(more)))
        assert time.monotonic() - begun < LINGER_S + 4, "nobody stopped it"
    assert process.memory_info().rss < before + 16_000_000


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        (["x-long: " + "a" * MAX_HEAD_BYTES], f"{MAX_HEAD_BYTES} bytes"),
        (["x-long: " + "a" * 1_000_000], f"{MAX_HEAD_BYTES} bytes"),
        ([f"x-{n}: {'a' * 400}" for n in range(200)], f"{MAX_HEAD_BYTES} bytes"),
        ([f"x-{n}: a" for n in range(MAX_HEAD_FIELDS)], f"{MAX_HEAD_FIELDS} header fields"),
        ([f"x-{n}: a" for n in range(10_000)], f"{MAX_HEAD_FIELDS} header fields"),
    ],
    ids=["64 KB", "1 MB", "many long ones", "257 fields", "10,000 fields"],
)
def test_headers_beyond_a_limit_are_a_431_that_names_it(quiet_api: Api, lines: list[str], words: str) -> None:
    answer = ask(quiet_api.url, get("/health/live", *lines))
    assert answer.status == 431
    assert (answer.error["type"], answer.error["code"]) == ("invalid_request_error", "headers_too_large")
    assert words in answer.error["message"]
    assert answer.headers["connection"] == "close"


def test_headers_within_the_limits_are_taken(quiet_api: Api) -> None:
    fields = [f"x-{n}: {'a' * 200}" for n in range(MAX_HEAD_FIELDS - 1)]
    assert ask(quiet_api.url, get("/health/live", *fields)).status == 200
    assert ask(quiet_api.url, get(f"/health/live?{'q' * 60_000}")).status == 200


@pytest.mark.parametrize(
    "lines",
    [
        ["content-length: abc"],
        ["content-length: -1"],
        ["content-length: 1e3"],
        ["content-length: " + "9" * 30],
        ["content-length: 2", "content-length: 3"],
        ["content-length: 2, 2"],
        ["content-length: 2", "transfer-encoding: chunked"],
        ["transfer-encoding: chunked", "content-length: 2"],
        ["transfer-encoding: chunked, identity"],
        ["x y: 1"],
        ["nocolon"],
        ["x: \0"],
    ],
)
def test_headers_that_contradict_themselves_are_a_400(quiet_api: Api, lines: list[str]) -> None:
    head = "\r\n".join([f"POST {COMPLETIONS} HTTP/1.1", "host: x", *lines]).encode()
    answer = ask(quiet_api.url, head + b"\r\n\r\n{}")
    assert (answer.status, answer.error["code"]) == (400, "invalid_http")
    assert answer.headers["connection"] == "close"


@pytest.mark.parametrize(
    "raw",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"hello\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"GET /\xff HTTP/1.1\r\n\r\n",
        b"GET / HTTP/1.1\nhost: x\n\n",
        b"CONNECT x:443 HTTP/1.1\r\nhost: x\r\n\r\n",
        post(COMPLETIONS, b"")[:-2].replace(b"content-length: 0", b"transfer-encoding: chunked") + b"\r\nzz\r\n{}\r\n",
    ],
    ids=["TLS", "HTTP/2", "no HTTP", "9.9", "bytes", "bare LF", "CONNECT", "chunk"],
)
def test_what_is_no_request_is_a_400_in_the_same_shape(quiet_api: Api, raw: bytes) -> None:
    answer = ask(quiet_api.url, raw)
    assert (answer.status, answer.error["code"]) == (400, "invalid_http")


@pytest.mark.parametrize("host", ["[::1", "", "a b", "x" * 5000, "%zz", "höst"])
def test_no_host_makes_it_fail(quiet_api: Api, host: str) -> None:
    raw = f"GET /v1/nothing HTTP/1.1\r\nhost: {host}\r\n\r\n".encode("latin-1")
    assert ask(quiet_api.url, raw).status in (400, 404)


@pytest.mark.parametrize("path", ["/%00", "/%ff%fe", "/%f0%9f%98%80", "//v1//models", "/v1/models/%2e%2e", "/?%zz=1"])
def test_no_path_makes_it_fail(quiet_api: Api, path: str) -> None:
    answer = ask(quiet_api.url, get(path))
    assert answer.status == 404
    assert answer.error["message"]


# --- time


def test_a_body_that_does_not_arrive_in_time_is_a_408_and_the_connection_closes(hasty_api: Api) -> None:
    with Connection(hasty_api.url) as connection:
        connection.send(post(COMPLETIONS, completion())[:-5])
        begun = time.monotonic()
        answer = connection.answer()
        assert SHORT_S * 0.8 < time.monotonic() - begun < SHORT_S + 3
        assert (answer.status, answer.error["code"]) == (408, "request_timeout")
        assert f"body did not arrive within {SHORT_S:g} seconds" in answer.error["message"]
        connection.closed_after()
        assert not connection.unread


@pytest.mark.parametrize("raw", [get("/health/live"), post(COMPLETIONS, completion())], ids=["head", "body"])
def test_a_request_that_trickles_is_a_408(hasty_api: Api, raw: bytes) -> None:
    """A slow loris: there is always a next byte, and never a last one."""
    with Connection(hasty_api.url) as connection:
        connection.send(raw[:-40] if raw.startswith(b"POST") else raw[:4])
        begun = time.monotonic()
        for n in range(39):
            connection.pour([raw[-40 + n : -39 + n] if raw.startswith(b"POST") else b"a"])
            if time.monotonic() - begun > SHORT_S * 1.5:
                break
            time.sleep(0.1)  # the loris's own pace
        assert connection.answer().status == 408


def test_a_connection_on_which_nothing_is_asked_is_closed_without_a_word(hasty_api: Api) -> None:
    for nothing in (b"", b"\r\n\r\n"):
        with Connection(hasty_api.url) as connection:
            connection.send(nothing)
            assert connection.closed_after() < SHORT_S + 3
            assert not connection.unread


def test_an_answer_without_the_body_ends_a_connection_on_which_the_body_never_comes(hasty_api: Api) -> None:
    with Connection(hasty_api.url) as connection:
        connection.send(post("/v1/nothing", b"x" * 100)[:-100])
        assert connection.answer().status == 404
        assert connection.closed_after() < 8


def test_an_answer_may_take_longer_than_a_request(new_fleet: Fleet) -> None:
    api = new_fleet.api(body_timeout_s=0.5)
    new_fleet.worker(Role.UNIFIED, null=NullModel(step_ms=25))
    until_ready(api.url)
    with Connection(api.url) as connection:
        for stream in (False, True):
            begun = time.monotonic()
            connection.send(post(COMPLETIONS, completion(stream=stream)))
            answer = connection.answer()
            assert answer.status == 200
            assert time.monotonic() - begun > 1
            assert answer.body.endswith(b"data: [DONE]\n\n") == stream


# --- the manners of HTTP/1.1


def test_a_client_that_asks_first_is_told_to_go_on(quiet_api: Api) -> None:
    body = b'{"model": "null"}'
    with Connection(quiet_api.url) as connection:
        connection.send(post(COMPLETIONS, body, "expect: 100-continue")[: -len(body)])
        assert connection.answer().status == 100
        connection.send(body)
        assert connection.answer().error["param"] == "prompt"


def test_a_client_that_asks_first_with_too_large_a_body_need_not_send_it(quiet_api: Api) -> None:
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nhost: x\r\ncontent-length: 999999999\r\nexpect: 100-continue\r\n\r\n"
    answer = ask(quiet_api.url, head.encode())
    assert (answer.status, answer.error["code"]) == (413, "request_too_large")


def test_a_stream_for_http_1_0_has_no_chunks_and_ends_with_the_connection(
    quiet_api: Api, scripted: ScriptedWorker
) -> None:
    asked = post(COMPLETIONS, completion(stream=True)).replace(b"HTTP/1.1", b"HTTP/1.0", 1)
    with Connection(quiet_api.url) as connection:
        connection.send(asked)
        claim = scripted.take()
        scripted.emit(claim, 0, [1])
        connection.until(b"data: ")
        scripted.finish(claim, 1, [2])
        connection.closed_after()
        head, _, body = connection.unread.partition(b"\r\n\r\n")
    assert b"transfer-encoding" not in head.lower()
    assert b"connection: close" in head.lower()
    lines = [line for line in body.split(b"\n") if line]
    assert lines[-1] == b"data: [DONE]"
    assert all(line.startswith((b"id: ", b"data: ", b": ")) for line in lines), lines


def test_an_answer_of_a_known_length_is_the_same_for_http_1_0(quiet_api: Api) -> None:
    answer = ask(quiet_api.url, get("/v1/models").replace(b"HTTP/1.1", b"HTTP/1.0", 1))
    assert (answer.status, answer.headers["connection"]) == (200, "close")
    assert json.loads(answer.body) == http.get(f"{quiet_api.url}/v1/models").json()


def test_pipelined_requests_are_answered_in_order(quiet_api: Api) -> None:
    count = MAX_PIPELINED + 5
    with Connection(quiet_api.url) as connection:
        requests = [get("/v1/models"), post(COMPLETIONS, b"{}"), get("/v1/nothing"), LIVE]
        connection.send(*itertools.islice(itertools.cycle(requests), count))
        found = [connection.answer().status for _ in range(count)]
        assert found == list(itertools.islice(itertools.cycle([200, 400, 404, 200]), count))


def test_thousands_of_pipelined_requests_are_refused(quiet_api: Api) -> None:
    with Connection(quiet_api.url) as connection:
        connection.pour([LIVE * 5_000])
        connection.closed_after()
        assert b"too_many_pipelined" in connection.unread


def test_a_client_that_leaves_with_requests_behind_its_stream_ends_the_job(
    quiet_api: Api, scripted: ScriptedWorker
) -> None:
    with Connection(quiet_api.url) as connection:
        connection.send(post(COMPLETIONS, completion(stream=True)), LIVE, post(COMPLETIONS, b"{}"))
        claim = scripted.take()
        scripted.emit(claim, 0, [1])
        connection.until(b"data: ")
    until(lambda: scripted.state(claim.id)["st"] == "done")
    assert scripted.state(claim.id)["fin"] == "cancelled"


def test_a_client_that_closes_its_half_of_the_connection_has_left(quiet_api: Api, scripted: ScriptedWorker) -> None:
    """A stream can only end early by its client's end of file, so that has to mean it."""
    with Connection(quiet_api.url) as connection:
        connection.send(post(COMPLETIONS, completion(stream=True)))
        claim = scripted.take()
        connection.half_close()
        until(lambda: scripted.state(claim.id)["st"] == "done")
        assert scripted.state(claim.id)["fin"] == "cancelled"
        assert connection.closed_after() < 5


def test_nonsense_behind_a_request_cuts_its_stream_and_is_not_answered_within_it(
    quiet_api: Api, scripted: ScriptedWorker
) -> None:
    with Connection(quiet_api.url) as connection:
        connection.send(post(COMPLETIONS, completion(stream=True)))
        claim = scripted.take()
        scripted.emit(claim, 0, [1])
        connection.until(b"data: ")
        connection.send(b"\0nonsense\r\n\r\n")
        connection.closed_after()
        assert b"HTTP/1.1 400" not in connection.unread
        assert b"[DONE]" not in connection.unread
    until(lambda: scripted.state(claim.id)["st"] == "done")


@pytest.mark.parametrize("protocol", ["websocket", "h2c"])
def test_an_offer_of_another_protocol_is_passed_over(quiet_api: Api, protocol: str) -> None:
    """Java's own client offers h2c with every first request, and uvicorn forgets that request's body."""
    offer = (
        "Connection: Upgrade, HTTP2-Settings",
        f"Upgrade: {protocol}",
        "HTTP2-Settings: AAEAAEAAAAIAAAABAAMAAABkAAQ",
    )
    body = b'{"prompt": "t1 t2"}'
    whole = post("/tokenize", body, *offer)
    with Connection(quiet_api.url) as connection:
        for cut in (len(whole), 40, len(whole) - len(body), len(whole) - 5):
            connection.send(whole[:cut])
            connection.send(whole[cut:], get("/v1/models"))
            assert json.loads(connection.answer().body)["tokens"] == [1, 2]
            assert connection.answer().status == 200
    answer = ask(quiet_api.url, get("/v1/realtime", *offer))
    assert (answer.status, answer.error["code"]) == (404, "not_served")
    chunked = CHUNKED.replace(b"host: x", "\r\n".join(["host: x", *offer]).encode())
    assert ask(quiet_api.url, chunked, b"0\r\n\r\n").error["param"] == "model"


def test_trailers_are_no_headers_and_have_a_limit(quiet_api: Api) -> None:
    assert ask(quiet_api.url, CHUNKED, b"0\r\ncontent-encoding: gzip\r\n\r\n").error["param"] == "model"
    many = b"".join(b"x-%d: 1\r\n" % n for n in range(1000))
    assert ask(quiet_api.url, CHUNKED, b"0\r\n", many, b"\r\n").status == 431


def test_a_body_in_a_thousand_chunks_is_read(quiet_api: Api) -> None:
    chunked = CHUNKED.partition(b"2\r\n")[0]
    body = b"{" + b" " * 200_000 + b"}"
    chunks = [b"%x\r\n%b\r\n" % (len(part), part) for part in (body[i : i + 20] for i in range(0, len(body), 20))]
    assert ask(quiet_api.url, chunked, *chunks, b"0\r\n\r\n").error["param"] == "model"


# --- methods and paths


@pytest.mark.parametrize(
    ("method", "path", "allow"),
    [
        ("GET", COMPLETIONS, "POST"),
        ("DELETE", "/v1/models", "HEAD, GET"),
        ("OPTIONS", COMPLETIONS, "POST"),
        ("TRACE", "/v1/models/null", "HEAD, GET"),
        ("PUT", "/tokenize", "POST"),
        ("PUT", "/v1/streams/x", "HEAD, GET, DELETE"),
        ("PROPFIND", "/health", "HEAD, GET"),
    ],
)
def test_a_wrong_method_is_a_405_that_says_which_are_right(quiet_api: Api, method: str, path: str, allow: str) -> None:
    answer = http.request(method, quiet_api.url + path)
    assert (answer.status_code, answer.headers["allow"]) == (405, allow)
    error = answer.json()["error"]
    assert (error["type"], error["code"]) == ("invalid_request_error", "method_not_allowed")
    assert method in error["message"]


def test_another_origin_is_given_no_leave(quiet_api: Api) -> None:
    origin = {"origin": "https://elsewhere.example"}
    preflight = http.request(
        "OPTIONS", quiet_api.url + COMPLETIONS, headers={**origin, "access-control-request-method": "POST"}
    )
    assert preflight.status_code == 405
    for answer in (preflight, http.get(f"{quiet_api.url}/v1/models", headers=origin)):
        assert not [name for name in answer.headers if name.startswith("access-control")]


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("/v1/embeddings", "embeddings are not served"),
        ("/v1/responses", "the Responses API is not served"),
        ("/v1/responses/resp_1", "the Responses API is not served"),
        ("/v1/audio/speech", "audio is not served"),
        ("/v1/audio/transcriptions", "audio is not served"),
        ("/v1/images/generations", "images are not served"),
        ("/v1/moderations", "moderations are not served"),
        ("/v1/fine_tuning/jobs", "fine-tuning is not served"),
        ("/v1/assistants", "assistants are not served"),
        ("/v1/threads/t/runs", "threads are not served"),
        ("/v1/vector_stores", "vector stores are not served"),
        ("/v1/uploads", "uploads in parts are not served"),
        ("/v1/realtime", "realtime sessions are not served"),
        ("/v1/rerank", "reranking is not served"),
        ("/score", "scoring is not served"),
        ("/v1/messages", "Messages API is not served"),
        ("/v1beta/models/x:generateContent", "Google's API is not served"),
    ],
)
def test_what_others_serve_is_refused_with_the_reason(quiet_api: Api, path: str, words: str) -> None:
    for method in ("POST", "GET"):
        answer = http.request(method, quiet_api.url + path, json={"model": "null"})
        error = answer.json()["error"]
        assert (answer.status_code, error["type"], error["code"]) == (404, "invalid_request_error", "not_served")
        assert words in error["message"]


def test_a_path_that_only_begins_like_one_of_those_is_unknown(quiet_api: Api) -> None:
    error = http.get(f"{quiet_api.url}/v1/embeddingsx").json()["error"]
    assert (error["code"], error["message"]) == ("unknown_path", "no such path: /v1/embeddingsx")
