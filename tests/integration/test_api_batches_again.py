"""A request for a batch that its client sends again begins no second one."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import httpx2
import openai
import pytest

from prelay_files import keys
from prelay_files.folder import BatchFolder
from tests.bed import http
from tests.bed.batch import COMPLETIONS
from tests.bed.processes import Api, fleet
from tests.bed.servers import Server

LINE = b'{"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"model": "null", "prompt": "x"}}\n'


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("kept")


@pytest.fixture(scope="module")
def two(shared_server: Server, null_folder: Path, root: Path) -> Iterator[tuple[Api, Api]]:
    with fleet(shared_server.settings(), null_folder) as found:
        yield found.api(files_dir=root), found.api(files_dir=root)


@pytest.fixture
def order(two: tuple[Api, Api]) -> dict[str, Any]:
    with openai.OpenAI(base_url=f"{two[0].url}/v1", api_key="none") as client:
        file = client.files.create(file=("in.jsonl", LINE), purpose="batch")
    return {"input_file_id": file.id, "endpoint": COMPLETIONS, "completion_window": "24h"}


def create(api: Api, order: dict[str, Any], key: str = "", api_key: str = "", retry: str = "") -> httpx.Response:
    headers = {
        "idempotency-key": key,
        "authorization": api_key and f"Bearer {api_key}",
        "x-stainless-retry-count": retry,
    }
    sent = {name: value for name, value in headers.items() if value}
    return http.post(f"{api.url}/v1/batches", json=order, headers=sent)


def id_of(answer: httpx.Response) -> str:
    assert answer.status_code == 200, answer.text
    batch = answer.json()["id"]
    assert isinstance(batch, str)
    return batch


def test_the_same_key_and_body_are_the_same_batch_on_any_api_process(
    two: tuple[Api, Api], order: dict[str, Any]
) -> None:
    first = id_of(create(two[0], order, "k1"))
    assert id_of(create(two[1], order, "k1")) == first
    assert id_of(create(two[1], dict(reversed(order.items())), "k1")) == first, "the order of names says nothing"
    assert id_of(create(two[0], order, "k2")) != first
    assert id_of(create(two[0], order, "k1", api_key="somebody else")) != first
    assert id_of(create(two[0], order)) != first


def test_another_body_under_the_same_key_is_refused_and_names_the_batch(
    two: tuple[Api, Api], order: dict[str, Any]
) -> None:
    first = id_of(create(two[0], order, "k3"))
    answer = create(two[1], {**order, "completion_window": "1h"}, "k3")
    assert (answer.status_code, answer.json()["error"]["code"]) == (422, "idempotency_key_reused")
    assert first in answer.json()["error"]["message"]
    assert id_of(create(two[0], order, "k3")) == first


def test_many_that_come_at_once_under_one_key_get_one_batch(two: tuple[Api, Api], order: dict[str, Any]) -> None:
    with ThreadPoolExecutor(8) as threads:
        answers = list(threads.map(lambda n: create(two[n % 2], order, "k4"), range(8)))
    assert len({id_of(answer) for answer in answers}) == 1


def test_a_refused_request_leaves_its_key_free(two: tuple[Api, Api], order: dict[str, Any]) -> None:
    wrong = {**order, "input_file_id": f"file-{0:024x}"}
    assert create(two[0], wrong, "k5").status_code == 400
    id_of(create(two[0], order, "k5"))


@pytest.mark.parametrize("key", ["", "x" * 256])
def test_a_key_that_is_none_is_refused(two: tuple[Api, Api], order: dict[str, Any], key: str) -> None:
    answer = http.post(f"{two[0].url}/v1/batches", json=order, headers={"idempotency-key": key})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "Idempotency-Key")


def test_a_key_that_somebody_holds_is_waited_for(two: tuple[Api, Api], order: dict[str, Any], root: Path) -> None:
    first = id_of(create(two[0], order, "k6"))
    (path,) = (path for path in (root / "keys").iterdir() if first.encode() in path.read_bytes())
    note = keys.KeyNote.take(root, path.name)
    assert note is not None
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(create, two[1], order, "k6")
        with pytest.raises(TimeoutError):
            waiting.result(0.2)
        note.close()
        assert id_of(waiting.result(10)) == first


class LosesReplies(httpx2.BaseTransport):
    """Lets the first request for a batch through, and loses its answer."""

    def __init__(self) -> None:
        self.inner = httpx2.HTTPTransport()
        self.counts: list[str] = []

    def handle_request(self, request: httpx2.Request) -> httpx2.Response:
        answer = self.inner.handle_request(request)
        if request.url.path.endswith("/batches") and request.method == "POST":
            self.counts.append(request.headers.get("x-stainless-retry-count", ""))
            if len(self.counts) == 1:
                answer.read()
                answer.close()
                raise httpx2.ReadError("the answer is lost", request=request)
        return answer

    def close(self) -> None:
        self.inner.close()


def test_the_official_client_s_own_repeat_begins_no_second_batch(
    two: tuple[Api, Api], order: dict[str, Any], root: Path
) -> None:
    transport = LosesReplies()
    with (
        httpx2.Client(transport=transport) as through,
        openai.OpenAI(base_url=f"{two[0].url}/v1", api_key="none", http_client=through) as client,
    ):
        batch = client.batches.create(**order)
        assert transport.counts == ["0", "1"]
        of_file = [
            each.id for each in BatchFolder.list(root, limit=1000) if each.input_file_id == order["input_file_id"]
        ]
        assert of_file == [batch.id]
        assert client.batches.create(**order).id != batch.id, "asked once more on purpose"


def test_a_repeat_finds_no_batch_of_another_client_nor_one_that_is_too_old(
    two: tuple[Api, Api], order: dict[str, Any], root: Path
) -> None:
    first = id_of(create(two[0], order, api_key="a"))
    assert id_of(create(two[0], order, api_key="b", retry="1")) != first
    assert id_of(create(two[1], order, api_key="a", retry="2")) == first
    (path,) = (path for path in (root / "keys").iterdir() if first.encode() in path.read_bytes())
    note = keys.KeyNote.take(root, path.name)
    assert note is not None
    path.write_bytes(path.read_bytes().replace(str(int(note.noted_at)).encode(), str(int(time.time() - 700)).encode()))
    note.close()
    assert id_of(create(two[0], order, api_key="a", retry="1")) != first
