"""/v1/files through the official client, and through hands that make mistakes."""

from __future__ import annotations

import re
import signal
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import openai
import psutil
import pytest

from prelay_files.store import FileStore
from tests.bed import http
from tests.bed.processes import Api, Fleet, fleet, until
from tests.bed.servers import Server

MAX_BYTES, MAX_LINES, MAX_LINE = 1_000_000, 1_000, 10_000
LINE = b'{"custom_id": "a"}\n'


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("kept")


@pytest.fixture(scope="module")
def api(shared_server: Server, null_folder: Path, root: Path) -> Iterator[Api]:
    """An API process that keeps files, with limits that a test can reach."""
    with fleet(shared_server.settings(), null_folder) as found:
        yield found.api(
            files_dir=root,
            body_timeout_s=1.0,
            max_file_bytes=MAX_BYTES,
            max_file_lines=MAX_LINES,
            max_line_bytes=MAX_LINE,
        )


@pytest.fixture(autouse=True)
def nothing_is_left_behind(api: Api, root: Path) -> Iterator[None]:
    """No half of a file, no open one, and nothing failed inside."""
    yield
    left = [path.name for path in (root / "files").iterdir() if path.name.startswith(".")]
    assert not left
    # The client has the last byte before the file is closed. The process's own lock, beside the files, stays.
    files = str(root / "files")
    until(lambda: not [file for file in psutil.Process(api.pid).open_files() if file.path.startswith(files)])
    assert "Traceback" not in api.log


@pytest.fixture
def client(api: Api) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{api.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def upload(api: Api, content: bytes = LINE, **form: object) -> httpx.Response:
    fields = {"purpose": "batch", **form}
    return http.post(f"{api.url}/v1/files", files={"file": ("in.jsonl", content)}, data=fields)


def test_the_official_client_uploads_looks_up_reads_and_deletes(client: openai.OpenAI) -> None:
    content = LINE * 300
    made = client.files.create(file=("ein größeres.jsonl", content), purpose="batch")
    assert (made.bytes, made.filename, made.purpose, made.status) == (
        len(content),
        "ein größeres.jsonl",
        "batch",
        "processed",
    )
    assert client.files.retrieve(made.id) == made
    assert client.files.content(made.id).read() == content
    assert client.files.delete(made.id).deleted
    with pytest.raises(openai.NotFoundError, match="there is no file"):
        client.files.retrieve(made.id)
    with pytest.raises(openai.NotFoundError):
        client.files.content(made.id)


def test_the_official_client_walks_along_the_list(client: openai.OpenAI) -> None:
    made = [client.files.create(file=("a.jsonl", LINE), purpose="batch").id for _ in range(5)]
    found = [file.id for file in client.files.list(limit=2)]
    assert [name for name in found if name in made] == made[::-1]
    found = [file.id for file in client.files.list(limit=2, order="asc", after=made[1], purpose="batch")]
    assert found == made[2:]
    assert [*client.files.list(purpose="batch_output")] == []


def test_a_file_of_any_bytes_comes_back_as_it_was(api: Api) -> None:
    content = bytes(range(256)) * 30 + b"\r\n--boundary\r\n\r\n--\r\n\n" * 50
    file = upload(api, content).json()
    assert http.get(f"{api.url}/v1/files/{file['id']}/content").content == content


@pytest.mark.parametrize(
    ("header", "part"),
    [
        ("bytes=3-", slice(3, None)),
        ("bytes=0-0", slice(0, 1)),
        ("bytes=2-99", slice(2, None)),
        ("bytes=9-9", slice(9, 10)),
    ],
)
def test_a_download_goes_on_where_it_broke(api: Api, header: str, part: slice) -> None:
    content = b"0123456789"
    file = upload(api, content).json()
    answer = http.get(f"{api.url}/v1/files/{file['id']}/content", headers={"range": header})
    assert (answer.status_code, answer.content) == (206, content[part])
    first, last = content.index(answer.content[:1]), content.index(answer.content[-1:])
    assert answer.headers["content-range"] == f"bytes {first}-{last}/10"


@pytest.mark.parametrize("header", ["bytes=-3", "bytes=1-2,4-5", "lines=1-", "bytes=5-2", ""])
def test_ranges_of_other_kinds_give_the_whole(api: Api, header: str) -> None:
    file = upload(api, b"0123456789").json()
    answer = http.get(f"{api.url}/v1/files/{file['id']}/content", headers={"range": header})
    assert (answer.status_code, answer.content) == (200, b"0123456789")


def test_a_range_behind_the_end_is_416(api: Api) -> None:
    file = upload(api, b"0123456789").json()
    answer = http.get(f"{api.url}/v1/files/{file['id']}/content", headers={"range": "bytes=10-"})
    assert (answer.status_code, answer.json()["error"]["param"]) == (416, "range")


def test_the_purpose_may_come_after_the_file(api: Api) -> None:
    body = (
        b'--x\r\ncontent-disposition: form-data; name="file"; filename="../../a b.jsonl"\r\n\r\n{}\n\r\n'
        b'--x\r\ncontent-disposition: form-data; name="purpose"\r\n\r\nbatch\r\n--x--\r\n'
    )
    answer = send(api, body)
    assert answer.status_code == 200, answer.text
    assert answer.json()["filename"] == "a b.jsonl"


def send(api: Api, body: bytes, content_type: str = "multipart/form-data; boundary=x") -> httpx.Response:
    return http.post(f"{api.url}/v1/files", content=body, headers={"content-type": content_type})


def part(name: str, content: bytes, more: str = "") -> bytes:
    return f'--x\r\ncontent-disposition: form-data; name="{name}"{more}\r\n\r\n'.encode() + content + b"\r\n"


FILE, PURPOSE, END = part("file", LINE, '; filename="a"'), part("purpose", b"batch"), b"--x--\r\n"

BAD_FORMS = {
    "nothing": (b"", "before its last boundary"),
    "no end": (PURPOSE + FILE, "before its last boundary"),
    "cut in a header": (PURPOSE + FILE[:20], "before its last boundary"),
    "no purpose": (FILE + END, "purpose is missing"),
    "no file": (PURPOSE + END, "file is missing"),
    "empty file": (PURPOSE + part("file", b"", '; filename="a"') + END, "file has 0 bytes"),
    "another purpose": (part("purpose", b"fine-tune") + FILE + END, "purpose must be batch.*not 'fine-tune'"),
    "two files": (PURPOSE + FILE + FILE + END, "file stands twice"),
    "two purposes": (PURPOSE + PURPOSE + FILE + END, "purpose stands twice"),
    "unknown field": (PURPOSE + part("model", b"null") + FILE + END, "'model' is not a field"),
    "an expiry": (PURPOSE + part("expires_after[seconds]", b"1") + FILE + END, "expires_after is not implemented"),
    "a long field": (part("purpose", b"b" * 5000) + FILE + END, "more bytes than the 1024"),
    "no name": (b"--x\r\n\r\nbatch\r\n" + END, "'' is not a field"),
    "another boundary": (b"--y\r\n\r\n\r\n--y--", "the form cannot be read"),
    "a long header": (b"--x\r\na: " + b"b" * 9000 + b"\r\n\r\n" + END, "the form cannot be read"),
}


@pytest.mark.parametrize("name", BAD_FORMS)
def test_a_bad_form_is_refused_by_name(api: Api, name: str) -> None:
    body, message = BAD_FORMS[name]
    answer = send(api, body)
    assert answer.status_code == 400, answer.text
    assert re.search(message, answer.json()["error"]["message"]), answer.text


@pytest.mark.parametrize("kind", ["application/json", "multipart/form-data", "multipart/mixed; boundary=x", ""])
def test_what_is_no_form_is_415(api: Api, kind: str) -> None:
    answer = send(api, PURPOSE + FILE + END, kind)
    assert (answer.status_code, answer.json()["error"]["code"]) == (415, "unsupported_media_type")


def test_a_file_at_its_limits_is_taken_and_one_beyond_is_refused_with_limit_and_value(api: Api) -> None:
    longest = b"x" * MAX_LINE
    cases = {
        "bytes": (longest[:-1] + b"\n") * (MAX_BYTES // MAX_LINE),
        "lines": b"x\n" * MAX_LINES,
        "line_bytes": longest + b"\n" + longest,
    }
    for content in cases.values():
        assert upload(api, content).status_code == 200
    answers = {name: upload(api, content + b"x") for name, content in cases.items()}
    found = {name: (answer.status_code, answer.json()["error"]["code"]) for name, answer in answers.items()}
    assert found == {
        "bytes": (413, "file_too_large"),
        "lines": (400, "too_many_lines"),
        "line_bytes": (400, "line_too_long"),
    }
    assert f"{MAX_BYTES} that are taken: {MAX_BYTES + 1}" in answers["bytes"].text
    assert f"{MAX_LINES} that are taken: {MAX_LINES + 1}" in answers["lines"].text
    assert f"line 2 of the file has more bytes than the {MAX_LINE}" in answers["line_bytes"].text


def test_a_body_that_says_it_is_too_large_need_not_be_sent(api: Api) -> None:
    with raw(api) as connection:
        connection.sendall(head(999_999_999))
        assert connection.recv(4096).startswith(b"HTTP/1.1 413 ")


def head(length: int) -> bytes:
    kind = "content-type: multipart/form-data; boundary=x"
    return f"POST /v1/files HTTP/1.1\r\nhost: x\r\n{kind}\r\ncontent-length: {length}\r\n\r\n".encode()


def raw(api: Api) -> socket.socket:
    place = urlsplit(api.url)
    assert place.hostname is not None
    return socket.create_connection((place.hostname, place.port or 80), timeout=20)


def parts_of(root: Path) -> list[Path]:
    return [path for path in (root / "files").iterdir() if path.name.startswith(".part-")]


def test_an_upload_whose_client_leaves_leaves_nothing(api: Api, root: Path) -> None:
    with raw(api) as connection:
        connection.sendall(head(900_000) + PURPOSE + FILE[:-2] + (b"x" * 499 + b"\n") * 800)
        until(lambda: parts_of(root))
    until(lambda: not parts_of(root))


def test_an_upload_that_stops_is_ended_in_time_and_leaves_nothing(api: Api, root: Path) -> None:
    with raw(api) as connection:
        connection.sendall(head(900_000) + PURPOSE + FILE)
        assert connection.recv(4096).startswith(b"HTTP/1.1 408 ")
    until(lambda: not parts_of(root))


def test_an_upload_that_keeps_flowing_may_take_longer_than_a_request(api: Api) -> None:
    """32 KB/s against a time of 1 s for a request."""
    body = PURPOSE + part("file", b"x" * 999 * 96, '; filename="a"').replace(b"x" * 999, b"x" * 998 + b"\n") + END
    with raw(api) as connection:
        connection.sendall(head(len(body)))
        for at in range(0, len(body), 4096):
            connection.sendall(body[at : at + 4096])
            threading.Event().wait(0.125)
        assert connection.recv(4096).startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize("name", ["file-x", "..%2f..%2fetc%2fpasswd", "%2e%2e", f"file-{0:024x}", "file-" + "g" * 24])
def test_a_name_that_is_no_file_is_404(api: Api, name: str) -> None:
    for method, path in (("GET", ""), ("DELETE", ""), ("GET", "/content")):
        answer = http.request(method, f"{api.url}/v1/files/{name}{path}")
        assert answer.status_code == 404, answer.text
        assert answer.json()["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("query", "message"),
    [
        ("limit=0", "limit must be an integer from 1 to 10000, not '0'"),
        ("limit=10001", "limit must be"),
        ("limit=-1", "limit must be"),
        ("limit=²", "limit must be"),
        ("after=../x", "after must be the id of a file, not '../x'"),
        ("order=up", "order must be one of asc, desc, not 'up'"),
        ("purpose=vision", "purpose must be one of"),
        ("before=x", "'before' is not a parameter of this list"),
        ("limit=1&limit=2", "limit is given twice"),
    ],
)
def test_a_wrong_query_is_refused_by_name(api: Api, query: str, message: str) -> None:
    answer = http.get(f"{api.url}/v1/files?{query}")
    assert answer.status_code == 400
    assert message in answer.json()["error"]["message"]


def test_without_a_folder_files_and_batches_are_off_and_say_so(quiet_api: Api) -> None:
    for method, path in (("GET", "/v1/files"), ("POST", "/v1/files"), ("GET", "/v1/batches"), ("POST", "/v1/batches")):
        answer = http.request(method, f"{quiet_api.url}{path}")
        assert answer.status_code == 404
        assert answer.json()["error"]["code"] == "not_served"
        assert "--files-dir DIR" in answer.json()["error"]["message"]


def test_transfers_are_ended_in_order_when_the_server_stops(new_fleet: Fleet, tmp_path: Path) -> None:
    api = new_fleet.api(files_dir=tmp_path)
    file = upload(api, b"x" * 999_000).json()
    many = FileStore(tmp_path).create("batch", "large")
    many.write(b"x" * 50_000_000)
    large = many.commit()
    with raw(api) as sending, raw(api) as taking:
        sending.sendall(head(900_000) + PURPOSE + FILE[:-2] + (b"x" * 499 + b"\n") * 800)
        until(lambda: parts_of(tmp_path))
        taking.sendall(f"GET /v1/files/{large.id}/content HTTP/1.1\r\nhost: x\r\n\r\n".encode())
        assert taking.recv(100).startswith(b"HTTP/1.1 200 ")
        api.send(signal.SIGTERM)
        assert sending.recv(4096).startswith(b"HTTP/1.1 503 ")
        assert api.wait() == 0
    assert not parts_of(tmp_path)
    assert "Traceback" not in api.log
    assert FileStore(tmp_path).get(file["id"]).bytes == 999_000


@pytest.mark.slow
def test_200_megabytes_are_taken_in_little_memory(shared_server: Server, null_folder: Path, tmp_path: Path) -> None:
    with fleet(shared_server.settings(), null_folder) as found:
        api = found.api(files_dir=tmp_path)
        process = psutil.Process(api.pid)
        before = process.memory_info().rss
        size = 200_000_000
        line = b"x" * 999 + b"\n"
        content = tmp_path / "large"
        with content.open("wb") as file:
            for _ in range(size // 1000):
                file.write(line)
        with (
            openai.OpenAI(base_url=f"{api.url}/v1", api_key="none", max_retries=0) as client,
            content.open("rb") as file,
        ):
            made = client.files.create(file=file, purpose="batch")
            assert made.bytes == size
            with client.files.with_streaming_response.content(made.id) as answer:
                assert sum(map(len, answer.iter_bytes())) == size
        assert process.memory_info().rss - before < 40_000_000
