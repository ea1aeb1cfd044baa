"""/v1/batches through the official client; the test itself is the runner."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import httpx
import openai
import orjson
import pytest
from openai.types import Batch

from prelay_files.folder import BatchFolder
from prelay_files.ids import new_batch_id
from prelay_files.ledger import Ledger
from prelay_files.record import BatchRecord
from prelay_files.store import FileStore
from prelay_queue.batch_jobs import BatchJobs
from prelay_queue.batches import BatchProgress, BatchScripts, BatchState, BatchStatus
from prelay_queue.client import SyncQueue
from prelay_queue.settings import QueueSettings
from prelay_worker.config import NullModel, Role
from tests.bed import http
from tests.bed.processes import Api, Fleet, fleet, until
from tests.bed.servers import Server

LINE = b'{"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"model": "null", "prompt": "x"}}\n'
CHAT: Literal["/v1/chat/completions"] = "/v1/chat/completions"
COMPLETIONS: Literal["/v1/completions"] = "/v1/completions"


class Runner:
    """A runner in the hands of a test."""

    def __init__(self, settings: QueueSettings, root: Path) -> None:
        self.root = root
        self.queue = SyncQueue(settings)
        self.scripts = BatchScripts(self.queue.keys)
        self.jobs = BatchJobs(settings.url, settings.fleet)

    def take(self, batch: str, lease_ms: int = 60_000) -> int:
        taken = self.queue.run(self.scripts.take(batch, "me", lease_ms))
        assert taken.code == "ok"
        return taken.epoch

    def keep(self, batch: str, status: BatchStatus, progress: BatchProgress) -> None:
        epoch = self.take(batch)
        assert self.queue.run(self.scripts.keep(batch, epoch, "me", 60_000, status, progress)).code == "ok"

    def end(
        self,
        batch: str,
        status: BatchStatus,
        progress: BatchProgress,
        output: str = "",
        error: str = "",
        errors: str = "",
    ) -> None:
        epoch = self.take(batch)
        said = self.scripts.end(batch, epoch, "me", status, progress, output, error, errors)
        assert self.queue.run(said) == "ok"

    def state(self, batch: str) -> BatchState | None:
        return self.queue.run(self.scripts.look(batch))

    def listed(self, batch: str) -> bool:
        """Whether RQ has a job for it that waits."""
        return self.jobs.redis.lpos(self.jobs.queue.key, batch) is not None

    def close(self) -> None:
        self.queue.close()
        self.jobs.close()


@contextmanager
def runner_of(settings: QueueSettings, root: Path) -> Iterator[Runner]:
    runner = Runner(settings, root)
    try:
        yield runner
    finally:
        runner.close()


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("kept")


@pytest.fixture(scope="module")
def settings(shared_server: Server) -> QueueSettings:
    return shared_server.settings()


@pytest.fixture(scope="module")
def api(settings: QueueSettings, null_folder: Path, root: Path) -> Iterator[Api]:
    with fleet(settings, null_folder) as found:
        yield found.api(files_dir=root)


@pytest.fixture
def runner(settings: QueueSettings, root: Path) -> Iterator[Runner]:
    with runner_of(settings, root) as found:
        yield found


@pytest.fixture
def client(api: Api) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{api.url}/v1", api_key="none", max_retries=0) as client:
        yield client
    assert "Traceback" not in api.log


def new_batch(client: openai.OpenAI, **changes: Any) -> Batch:
    file = client.files.create(file=("in.jsonl", LINE), purpose="batch")
    order: dict[str, Any] = {"endpoint": COMPLETIONS, "completion_window": "24h", "input_file_id": file.id, **changes}
    return client.batches.create(**order)


def test_a_new_batch_waits_for_a_runner(client: openai.OpenAI, runner: Runner) -> None:
    batch = new_batch(client, metadata={"of": "me"})
    assert (batch.object, batch.status, batch.endpoint, batch.completion_window) == (
        "batch", "validating", COMPLETIONS, "24h",
    )  # fmt: skip
    assert batch.metadata == {"of": "me"}
    assert batch.expires_at == batch.created_at + 86400
    assert batch.request_counts is not None
    assert batch.request_counts.total == 0
    assert {batch.output_file_id, batch.error_file_id, batch.errors, batch.in_progress_at} == {None}
    assert runner.listed(batch.id)
    state = runner.state(batch.id)
    assert state is not None
    record = BatchFolder(runner.root, batch.id).record()
    assert BatchRecord.decode(state.record) == record
    assert 0 < state.left_ms <= 86_400_000
    assert client.batches.retrieve(batch.id) == batch


def test_a_batch_is_shown_as_its_runner_moves_it(client: openai.OpenAI, runner: Runner) -> None:
    batch = new_batch(client, endpoint=CHAT)
    runner.keep(batch.id, BatchStatus.IN_PROGRESS, BatchProgress(10, 3, 1, 30, 40))
    batch = client.batches.retrieve(batch.id)
    assert batch.status == "in_progress"
    assert batch.request_counts is not None
    assert batch.request_counts.model_dump() == {"total": 10, "completed": 3, "failed": 1}
    assert batch.usage is not None
    assert (batch.usage.input_tokens, batch.usage.output_tokens, batch.usage.total_tokens) == (30, 40, 70)
    assert batch.in_progress_at is not None
    assert batch.finalizing_at is None
    runner.keep(batch.id, BatchStatus.FINALIZING, BatchProgress(10, 9, 1))
    assert client.batches.retrieve(batch.id).finalizing_at is not None
    runner.end(batch.id, BatchStatus.COMPLETED, BatchProgress(10, 9, 1), "file-1", "file-2")
    ended = client.batches.retrieve(batch.id)
    assert (ended.status, ended.output_file_id, ended.error_file_id) == ("completed", "file-1", "file-2")
    assert ended.completed_at is not None
    assert ended.failed_at is ended.expired_at is ended.cancelled_at is None


def test_the_end_outlives_redis(client: openai.OpenAI, runner: Runner) -> None:
    batch = new_batch(client)
    errors = orjson.dumps([{"code": "bad", "message": "the file is bad", "line": 3}]).decode()
    runner.end(batch.id, BatchStatus.FAILED, BatchProgress(3, 0, 0), errors=errors)
    seen = client.batches.retrieve(batch.id)
    assert seen.errors is not None
    assert seen.errors.data is not None
    assert (seen.errors.data[0].message, seen.errors.data[0].line) == ("the file is bad", 3)
    runner.queue.redis.delete(runner.queue.keys.batch(batch.id))
    assert client.batches.retrieve(batch.id) == seen
    with pytest.raises(openai.ConflictError, match="is failed: it cannot be cancelled"):
        client.batches.cancel(batch.id)


def test_cancel_asks_the_runner_and_may_be_asked_again(client: openai.OpenAI, runner: Runner) -> None:
    batch = new_batch(client)
    for _ in range(2):
        cancelling = client.batches.cancel(batch.id)
        assert (cancelling.status, cancelling.cancelling_at is not None) == ("cancelling", True)
    runner.end(batch.id, BatchStatus.CANCELLED, BatchProgress(1, 0, 1), "", "file-9")
    cancelled = client.batches.cancel(batch.id)
    assert cancelled == client.batches.retrieve(batch.id)
    assert (cancelled.status, cancelled.cancelled_at is not None) == ("cancelled", True)


def test_a_batch_that_redis_lost_can_be_cancelled(client: openai.OpenAI, runner: Runner) -> None:
    batch = new_batch(client)
    runner.queue.redis.delete(runner.queue.keys.batch(batch.id), runner.queue.keys.batches)
    assert client.batches.retrieve(batch.id).status == "validating"
    assert client.batches.cancel(batch.id).status == "cancelling"


def test_batches_are_listed_newest_first_page_by_page(client: openai.OpenAI) -> None:
    made = [new_batch(client).id for _ in range(5)]
    assert [batch.id for batch in client.batches.list(limit=2)][:5] == made[::-1]
    page = client.batches.list(limit=2, after=made[2])
    assert [batch.id for batch in page.data] == [made[1], made[0]]


def test_the_input_of_a_batch_that_is_not_over_cannot_be_deleted(client: openai.OpenAI, runner: Runner) -> None:
    batch = new_batch(client)
    with pytest.raises(openai.ConflictError, match=f"is the input of {batch.id}, which is not over"):
        client.files.delete(batch.input_file_id)
    runner.end(batch.id, BatchStatus.COMPLETED, BatchProgress())
    client.batches.retrieve(batch.id)
    assert client.files.delete(batch.input_file_id).deleted


def ask(api: Api, **order: Any) -> httpx.Response:
    return http.post(f"{api.url}/v1/batches", json=order)


GOOD = {"endpoint": COMPLETIONS, "completion_window": "24h", "input_file_id": f"file-{0:024x}"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"endpoint": "/v1/embeddings"}, "endpoint must be one of /v1/completions, /v1/chat/completions"),
        ({"completion_window": "24"}, "completion_window must be a time from"),
        ({"completion_window": "31d"}, 'completion_window must be a time from "1m" to "30d"'),
        ({"completion_window": "0h"}, "not '0h'"),
        ({"completion_window": 24}, "not int 24"),
        ({"completion_window": "99999d"}, "not '99999d'"),
        ({"input_file_id": None}, "input_file_id must be a string, not null"),
        ({"input_file_id": "../../etc/passwd"}, "there is no file '../../etc/passwd'"),
        ({}, "there is no file 'file-0"),
        ({"metadata": {f"k{at}": "v" for at in range(17)}}, "metadata may have up to 16 entries, not 17"),
        ({"metadata": {"k" * 65: "v"}}, "must be a string of 1 to 64 characters, not of 65"),
        ({"metadata": {"k": "v" * 513}}, "metadata.k must be a string of 0 to 512 characters, not of 513"),
        ({"metadata": {"k": 1}}, "metadata.k must be a string, not int 1"),
        (
            {"output_expires_after": {"anchor": "created_at", "seconds": 3600}},
            "output_expires_after is not implemented",
        ),
        ({"model": "null"}, "'model' is not a parameter of this request"),
    ],
)
def test_a_wrong_order_is_refused_by_name(api: Api, changes: dict[str, Any], message: str) -> None:
    answer = ask(api, **{**GOOD, **changes})
    assert answer.status_code == 400, answer.text
    assert message in answer.json()["error"]["message"]


@pytest.mark.parametrize("name", GOOD)
def test_what_must_be_there_is_missed(api: Api, name: str) -> None:
    answer = ask(api, **{key: value for key, value in GOOD.items() if key != name})
    assert (answer.status_code, answer.json()["error"]["message"]) == (400, f"{name} is missing")


def test_results_are_no_input(client: openai.OpenAI, root: Path) -> None:
    with FileStore(root).create("batch_output", "out.jsonl") as writing:
        writing.write(LINE)
        file = writing.commit()
    with pytest.raises(openai.BadRequestError, match="with purpose batch, not batch_output"):
        client.batches.create(endpoint=COMPLETIONS, completion_window="24h", input_file_id=file.id)


@pytest.mark.parametrize(("window", "shown"), [("1m", "1m"), ("90m", "90m"), ("1d", "24h"), ("30d", "720h")])
def test_a_window_may_be_from_a_minute_to_thirty_days(client: openai.OpenAI, window: str, shown: str) -> None:
    assert new_batch(client, completion_window=window).completion_window == shown


@pytest.mark.parametrize("name", ["batch_x", "..%2f..", f"batch_{0:024x}", "batch_" + "g" * 24])
def test_a_name_that_is_no_batch_is_404(api: Api, name: str) -> None:
    for method, path in (("GET", ""), ("POST", "/cancel")):
        answer = http.request(method, f"{api.url}/v1/batches/{name}{path}")
        assert answer.status_code == 404, answer.text


def test_while_redis_is_away_a_batch_is_not_taken_and_leaves_nothing(
    own_server: Server, null_folder: Path, tmp_path: Path
) -> None:
    with fleet(own_server.settings(), null_folder) as found:
        api = found.api(files_dir=tmp_path)
        with openai.OpenAI(base_url=f"{api.url}/v1", api_key="none", max_retries=0) as client:
            file = client.files.create(file=("in.jsonl", LINE), purpose="batch")
            own_server.kill()
            with pytest.raises(openai.InternalServerError, match="does not answer"):
                client.batches.create(endpoint=COMPLETIONS, completion_window="24h", input_file_id=file.id)
            assert BatchFolder.list(tmp_path, limit=10) == []
            own_server.start()
            until(lambda: http.get(f"{api.url}/v1/batches").status_code == 200)
            assert client.batches.list().data == []


def test_a_file_is_answered_line_by_line_good_and_bad(new_fleet: Fleet, tmp_path: Path) -> None:
    """From the upload to the results, through real workers."""
    api = new_fleet.api(files_dir=tmp_path)
    new_fleet.worker(Role.UNIFIED, null=NullModel(step_ms=0))
    new_fleet.batch_worker(tmp_path)

    def line(name: str, **body: Any) -> bytes:
        whole = {"model": "null", "prompt": [1, 2], "max_tokens": 5, "seed": 1, **body}
        return orjson.dumps({"custom_id": name, "method": "POST", "url": COMPLETIONS, "body": whole})

    lines = [line("a"), b"", b"{", line("b", max_tokens=7), line("c", max_tokens=-1), line("a")]
    with openai.OpenAI(base_url=f"{api.url}/v1", api_key="none", max_retries=0) as client:
        file = client.files.create(file=("in.jsonl", b"\xef\xbb\xbf" + b"\r\n".join(lines)), purpose="batch")
        batch = client.batches.create(endpoint=COMPLETIONS, completion_window="24h", input_file_id=file.id)
        batch = until(lambda: (found := client.batches.retrieve(batch.id)).status == "completed" and found)
        assert batch.request_counts is not None
        assert batch.request_counts.model_dump() == {"total": 5, "completed": 2, "failed": 3}
        assert batch.usage is not None
        assert (batch.usage.input_tokens, batch.usage.output_tokens) == (4, 12)
        assert batch.output_file_id is not None
        assert batch.error_file_id is not None
        answers = [orjson.loads(each) for each in client.files.content(batch.output_file_id).read().splitlines()]
        errors = [orjson.loads(each) for each in client.files.content(batch.error_file_id).read().splitlines()]
        alone = client.completions.create(model="null", prompt=[1, 2], max_tokens=7, seed=1)
        listed = {file.id: file.purpose for file in client.files.list()}
    texts = {each["custom_id"]: each["response"]["body"]["choices"][0]["text"] for each in answers}
    assert set(texts) == {"a", "b"}
    assert texts["b"] == alone.choices[0].text
    assert sorted(each["id"].rpartition("_")[2] for each in errors) == ["2", "4", "5"]
    assert listed[batch.output_file_id] == listed[batch.error_file_id] == "batch_output"


# --- the watchdog


def write_record(root: Path, fleet_name: str, *, age_s: float = 100.0) -> BatchFolder:
    """What an API process leaves that dies before Redis hears of a batch."""
    now = int(time.time())
    record = BatchRecord(new_batch_id(), COMPLETIONS, f"file-{0:024x}", 3600, now, now + 3600, {}, fleet_name)
    folder = BatchFolder.create(root, record)
    old = time.time() - age_s
    os.utime(folder.path / "record.json", (old, old))
    return folder


def test_what_stands_on_disk_only_is_opened_at_the_start_above_the_epochs_that_ran(
    new_fleet: Fleet, tmp_path: Path
) -> None:
    lost = write_record(tmp_path, new_fleet.queue.fleet)
    for epoch in (1, 4):
        Ledger.take_over(lost, epoch).close()
    fresh = write_record(tmp_path, new_fleet.queue.fleet, age_s=0)
    other = write_record(tmp_path, "another model's")
    new_fleet.api(files_dir=tmp_path)
    with runner_of(new_fleet.queue, tmp_path) as runner:
        until(lambda: runner.listed(lost.id))
        assert runner.take(lost.id) == 5
        assert runner.state(fresh.id) is None  # its creator is about to open it
        assert runner.state(other.id) is None


def test_a_cancel_outlives_a_redis_that_loses_its_data(new_fleet: Fleet, tmp_path: Path) -> None:
    lost, reopened = (write_record(tmp_path, new_fleet.queue.fleet) for _ in range(2))
    for folder in (lost, reopened):
        folder.ask_cancel()
    with runner_of(new_fleet.queue, tmp_path) as runner:
        # A runner has been quicker, and does not know.
        runner.queue.run(runner.scripts.open(reopened.id, reopened.record().encode(), 60_000))
        new_fleet.api(files_dir=tmp_path)
        until(lambda: all((state := runner.state(each.id)) and state.cancel for each in (lost, reopened)))


def test_what_redis_has_and_the_disk_has_not_is_never_run_and_ends_with_its_window(
    new_fleet: Fleet, tmp_path: Path
) -> None:
    with runner_of(new_fleet.queue, tmp_path) as runner:
        waiting, over = new_batch_id(), new_batch_id()
        for batch, left_ms in ((waiting, 60_000), (over, -1)):
            runner.queue.run(runner.scripts.open(batch, b"{}", left_ms))
            taken = runner.queue.run(runner.scripts.take(batch, "gone", 0))
            runner.queue.redis.hset(runner.queue.keys.batch(batch), "lease", 1)
            assert taken.code == "ok"
        new_fleet.api(files_dir=tmp_path)
        until(lambda: (state := runner.state(over)) and state.status.over)
        assert not runner.listed(waiting)
        assert not runner.listed(over)
        state = runner.state(waiting)
        assert state is not None
        assert state.status is BatchStatus.VALIDATING


def test_an_end_that_only_redis_has_is_written_at_the_start(new_fleet: Fleet, tmp_path: Path) -> None:
    folder = write_record(tmp_path, new_fleet.queue.fleet)
    with runner_of(new_fleet.queue, tmp_path) as runner:
        runner.queue.run(runner.scripts.open(folder.id, folder.record().encode(), 1000))
        runner.end(folder.id, BatchStatus.EXPIRED, BatchProgress(2, 1, 1))
        new_fleet.api(files_dir=tmp_path)
        end = until(folder.end)
    assert (end["status"], end["progress"]["completed"]) == ("expired", 1)


@pytest.mark.slow
def test_a_batch_whose_runner_died_gets_a_new_job(new_fleet: Fleet, tmp_path: Path) -> None:
    api = new_fleet.api(files_dir=tmp_path)
    with (
        runner_of(new_fleet.queue, tmp_path) as runner,
        openai.OpenAI(base_url=f"{api.url}/v1", api_key="none", max_retries=0) as client,
    ):
        batch = new_batch(client)
        runner.jobs.forget(batch.id)
        runner.take(batch.id, lease_ms=100)
        assert not runner.listed(batch.id)
        until(lambda: runner.listed(batch.id), timeout_s=20, every_s=0.2)


def test_a_record_that_cannot_be_read_holds_up_no_other(new_fleet: Fleet, tmp_path: Path) -> None:
    bad, good = write_record(tmp_path, new_fleet.queue.fleet), write_record(tmp_path, new_fleet.queue.fleet)
    (bad.path / "record.json").write_bytes(b"{")
    os.utime(bad.path / "record.json", (0, 0))
    shutil.rmtree(write_record(tmp_path, new_fleet.queue.fleet).path)
    api = new_fleet.api(files_dir=tmp_path)
    with runner_of(new_fleet.queue, tmp_path) as runner:
        until(lambda: runner.listed(good.id))
    assert "cannot be read" in api.log
