"""Batches run by real batch workers over null workers and a real Redis."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import orjson
import pytest
from rq.job import Job

from prelay_files.folder import BatchFolder
from prelay_queue.scripts import text
from prelay_worker.config import NullModel, Role
from tests.bed.batch import CHATS, COMPLETIONS, Batches, jsonl, line, lines
from tests.bed.processes import Fleet, fleet, until
from tests.bed.servers import Server
from tests.bed.tokenizer import chat, words

#: Slow enough that a batch can be met while it runs.
SLOW = NullModel(step_ms=20)


@pytest.fixture
def batches(new_fleet: Fleet, tmp_path: Path) -> Iterator[Batches]:
    found = Batches(new_fleet.queue, tmp_path / "files")
    yield found
    found.close()


def until_some(batches: Batches, batch: str, count: int = 1) -> None:
    until(lambda: batches.look(batch).progress.completed >= count)


def test_a_batch_is_answered_line_by_line_and_leaves_nothing_in_the_queue(new_fleet: Fleet, batches: Batches) -> None:
    new_fleet.worker(Role.PREFILL)
    new_fleet.worker(Role.DECODE)
    worker = new_fleet.batch_worker(batches.files_dir)
    asked = lines(100)
    batch = batches.create(jsonl(asked))
    state = batches.until_over(batch)
    assert state.status == "completed"
    batches.check(batch, asked)
    end = until(lambda: BatchFolder(batches.files_dir, batch).end())
    assert (end["status"], end["output_file"]) == ("completed", state.output_file)
    keys = batches.queue.keys
    names = [text(name).removeprefix(keys.prefix) for name in batches.queue.redis.keys(f"{keys.prefix}*")]
    assert [name for name in names if name.startswith(("job:", "log:", "live:"))] == []
    assert batches.queue.redis.zcard(keys.apis) == 0
    until(lambda: not batches.jobs.redis.exists(Job.key_for(batch)))
    assert worker.stop() == 0


BODIES: dict[str, list[dict[str, Any]]] = {
    COMPLETIONS: [
        {"prompt": [1, 2, 3], "max_tokens": 5},
        {"prompt": words([4, 5]), "max_tokens": 5, "echo": True, "logprobs": 1},
        {"prompt": ["t1 t2", "t3"], "max_tokens": 3, "n": 2, "seed": 5},
        {"prompt": [[9], [8, 7]], "max_tokens": 4, "best_of": 3, "n": 2},
        {"prompt": "t9", "max_tokens": 6, "return_token_ids": True, "prompt_logprobs": 1},
        {"prompt": "t1 t2 t3", "max_tokens": 0, "echo": True, "logprobs": 0},
        {"prompt": "t5", "max_tokens": 40, "stop": ["t1", "t2"]},
        {"prompt": "t5", "max_tokens": 9, "stop": ["7"], "min_tokens": 3},
        {"prompt": "t6", "max_tokens": 8, "user": "u", "stream": False},
        {"prompt": "t1"},  # as many as fit
        {"prompt": "t1", "max_tokens": 300},  # more than the workers hold
        {"prompt": "", "max_tokens": 8},
        {"prompt": "t1", "max_tokens": 5000},
        {"prompt": "t1", "max_tokens": 5, "temperature": 9},
        {"prompt": "t1", "max_tokens": 5, "nonsense": 1},
    ],
    CHATS: [
        {"messages": chat([1, 2], [3]), "max_tokens": 5},
        {"messages": chat([1]), "max_completion_tokens": 4, "n": 3, "logprobs": True, "top_logprobs": 2},
        {"messages": chat([1]), "max_tokens": 4, "service_tier": "auto", "return_token_ids": True},
        {"messages": chat([1]), "max_tokens": 30, "stop": "t4", "prompt_logprobs": 0},
        {"messages": [], "max_tokens": 4},
        {"messages": chat([1]), "max_tokens": 4, "tools": [{"type": "function", "function": {"name": "f"}}]},
    ],
}


@pytest.mark.parametrize("endpoint", sorted(BODIES))
def test_a_line_gets_the_very_answer_that_the_server_gives(new_fleet: Fleet, batches: Batches, endpoint: str) -> None:
    """Byte for byte, but for the id and the time; refusals too."""
    new_fleet.worker(Role.UNIFIED, blocks=16)
    api = new_fleet.api()
    new_fleet.batch_worker(batches.files_dir)
    bodies = [{"model": "null", **body} for body in BODIES[endpoint]]
    rows = [{"custom_id": str(n), "method": "POST", "url": endpoint, "body": body} for n, body in enumerate(bodies)]
    batch = batches.create(jsonl(rows), endpoint)
    with httpx.Client(base_url=api.url, timeout=30) as client:
        wanted = [client.post(endpoint, json=body) for body in bodies]
    batches.until_over(batch)
    output, errors = batches.results(batch)
    assert {row["response"]["status_code"] for row in output} == {200}
    found = {int(row["custom_id"]): row for row in output + errors}
    assert sorted(found) == list(range(len(bodies)))
    for n, response in enumerate(wanted):
        told = found[n]["response"]
        assert told["status_code"] == response.status_code, (bodies[n], told)
        assert found[n]["error"] is None
        assert _without_time(told["body"]) == _without_time(orjson.loads(response.content)), bodies[n]
        assert list(told["body"]) == list(orjson.loads(response.content))
        if response.status_code == 200:
            assert told["body"]["id"] == told["request_id"]


def _without_time(body: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in body.items() if name not in ("id", "created")}


def test_bad_lines_are_told_one_by_one_and_the_good_ones_are_answered(new_fleet: Fleet, batches: Batches) -> None:
    new_fleet.worker(Role.UNIFIED)
    new_fleet.batch_worker(batches.files_dir)
    good = lines(5)
    rows = [orjson.dumps(row) for row in good]
    content = b"\r\n".join(
        [
            b"\xef\xbb\xbf" + rows[0], b"", b"{bad", b"[1, 2]", rows[1], rows[0],
            orjson.dumps({"custom_id": "no body", "method": "POST", "url": COMPLETIONS}),
            orjson.dumps({**good[2], "custom_id": "wrong url", "url": CHATS}),
            orjson.dumps(line("stream", (1,), stream=True)),
            b'{"custom_id": "\xff\xfe"}', rows[2], rows[3], b"  ", rows[4],
        ]
    )  # fmt: skip
    batch = batches.create(content)
    state = batches.until_over(batch)
    assert state.status == "completed"
    output, errors = batches.results(batch)
    assert sorted(row["custom_id"] for row in output) == [row["custom_id"] for row in good]
    told = {row["error"]["line"]: row["error"]["code"] for row in errors if row["custom_id"] is None}
    assert told == {3: "invalid_json", 4: "invalid_line", 6: "duplicate_custom_id", 10: "invalid_json"}
    named = {row["custom_id"]: row for row in errors if row["custom_id"] is not None}
    assert named["no body"]["error"]["code"] == "invalid_body"
    assert named["wrong url"]["error"]["code"] == "invalid_url"
    assert named["stream"]["response"]["body"]["error"]["param"] == "stream"
    assert (state.progress.total, state.progress.completed, state.progress.failed) == (12, 5, 7)


@pytest.mark.parametrize("content", [b"", b"\n \r\n"])
def test_a_file_without_lines_fails_with_the_reason(new_fleet: Fleet, batches: Batches, content: bytes) -> None:
    new_fleet.batch_worker(batches.files_dir)
    state = batches.until_over(batches.create(content))
    assert state.status == "failed"
    assert orjson.loads(state.errors)[0]["code"] == "empty_file"


def test_a_batch_whose_file_is_gone_fails_with_the_reason(new_fleet: Fleet, batches: Batches) -> None:
    batch = batches.create(jsonl(lines(1)))
    batches.store.delete(BatchFolder(batches.files_dir, batch).record().input_file_id)
    new_fleet.batch_worker(batches.files_dir)
    state = batches.until_over(batch)
    assert (state.status, orjson.loads(state.errors)[0]["code"]) == ("failed", "file_not_found")


def test_a_file_that_goes_while_its_batch_runs_takes_no_answer_along(new_fleet: Fleet, batches: Batches) -> None:
    new_fleet.worker(Role.UNIFIED, null=SLOW)
    asked = lines(2_000, max_tokens=4)
    batch = batches.create(jsonl(asked))
    first = new_fleet.batch_worker(batches.files_dir)
    until_some(batches, batch, 5)
    assert first.stop() == 0
    (batches.files_dir / "files" / BatchFolder(batches.files_dir, batch).record().input_file_id).unlink()
    new_fleet.batch_worker(batches.files_dir)
    state = batches.until_over(batch, watched=True)
    assert (state.status, orjson.loads(state.errors)[0]["code"]) == ("failed", "file_not_found")
    output, errors = batches.results(batch)
    assert 5 <= len(output) < 2_000
    assert errors == []
    assert {row["custom_id"] for row in output} <= {row["custom_id"] for row in asked}
    assert (state.progress.completed, state.progress.failed) == (len(output), 0)


def partition(batches: Batches, batch: str, code: str, ids: set[str]) -> int:
    """Output and errors hold each id once; the number of those that were answered."""
    output, errors = batches.results(batch)
    found = [row["custom_id"] for row in output + errors]
    assert len(found) == len(set(found))
    assert set(found) == ids
    assert {row["error"]["code"] for row in errors} <= {code}
    progress = batches.look(batch).progress
    assert (progress.completed, progress.failed) == (len(output), len(errors))
    return len(output)


@pytest.mark.parametrize("answered", [0, 5, 60])
def test_a_cancel_divides_the_lines_into_answered_and_cancelled(
    new_fleet: Fleet, batches: Batches, answered: int
) -> None:
    new_fleet.worker(Role.UNIFIED, null=SLOW)
    asked = lines(2_000, max_tokens=4)
    batch = batches.create(jsonl(asked))
    new_fleet.batch_worker(batches.files_dir)
    until_some(batches, batch, answered)
    batches.queue.run(batches.scripts.cancel(batch))
    assert batches.until_over(batch).status == "cancelled"
    count = partition(batches, batch, "batch_cancelled", {row["custom_id"] for row in asked})
    assert answered <= count < 2_000
    keys = batches.queue.keys
    until(lambda: not batches.queue.redis.zcard(keys.leases) and not batches.queue.redis.zcard(keys.queued))
    left = [text(key) for key in batches.queue.redis.keys(f"{keys.prefix}[jl]o[bg]:*")]
    assert left == [], "jobs and logs go with their batch"


def test_lines_that_the_window_ends_before_are_told_as_expired(new_fleet: Fleet, batches: Batches) -> None:
    new_fleet.worker(Role.UNIFIED, null=SLOW)
    new_fleet.batch_worker(batches.files_dir)
    asked = lines(2_000, max_tokens=20)  # so many that a worker takes three windows for them, at the least
    batch = batches.create(jsonl(asked), window_s=4)
    assert batches.until_over(batch).status == "expired"
    assert partition(batches, batch, "batch_expired", {row["custom_id"] for row in asked}) < 2_000


def test_a_line_may_have_a_deadline_of_its_own(new_fleet: Fleet, batches: Batches) -> None:
    new_fleet.worker(Role.UNIFIED, null=SLOW)
    new_fleet.batch_worker(batches.files_dir)
    batch = batches.create(jsonl([line("late", (1,), 2_000, deadline_ms=300), line("in time", (2,), 4)]))
    assert batches.until_over(batch).status == "completed"
    output, errors = batches.results(batch)
    assert [row["custom_id"] for row in output] == ["in time"]
    assert errors[0]["response"]["status_code"] == 504
    assert errors[0]["response"]["body"]["error"]["code"] == "deadline_exceeded"


def test_a_batch_that_is_cancelled_or_too_late_before_it_begins_runs_nothing(
    new_fleet: Fleet, batches: Batches
) -> None:
    asked = lines(20)
    cancelled, late = batches.create(jsonl(asked)), batches.create(jsonl(asked), window_s=0)
    batches.queue.run(batches.scripts.cancel(cancelled))
    new_fleet.batch_worker(batches.files_dir)  # and no worker that could run a line
    ids = {row["custom_id"] for row in asked}
    assert batches.until_over(cancelled).status == "cancelled"
    assert partition(batches, cancelled, "batch_cancelled", ids) == 0
    assert batches.until_over(late).status == "expired"
    assert partition(batches, late, "batch_expired", ids) == 0
    assert batches.queue.redis.keys(f"{batches.queue.keys.prefix}work:*") == []


def test_a_runner_that_hears_nothing_looks_for_itself(new_fleet: Fleet, batches: Batches) -> None:
    new_fleet.worker(Role.UNIFIED)
    new_fleet.batch_worker(batches.files_dir)
    asked = lines(60)
    batch = batches.create(jsonl(asked))
    redis, live = batches.queue.redis, f"{batches.queue.keys.prefix}live:~*"

    def deaf() -> bool:
        for key in redis.keys(live):
            redis.delete(key)
        return batches.look(batch).status.over

    until(deaf, timeout_s=60)
    batches.check(batch, asked)


def test_a_class_of_which_few_may_wait_only_slows_a_batch(
    shared_server: Server, null_folder: Path, tmp_path: Path
) -> None:
    settings = shared_server.settings(max_queued_jobs={"batch": 3})
    with fleet(settings, null_folder) as found:
        batches = Batches(settings, tmp_path / "files")
        found.worker(Role.UNIFIED)
        found.batch_worker(batches.files_dir)
        asked = lines(60)
        batch = batches.create(jsonl(asked))
        assert batches.until_over(batch).status == "completed"
        batches.check(batch, asked)
        batches.close()


def test_two_batches_run_side_by_side_and_none_has_to_wait(new_fleet: Fleet, batches: Batches) -> None:
    new_fleet.worker(Role.UNIFIED, null=SLOW)
    for _ in range(2):
        new_fleet.batch_worker(batches.files_dir)
    asked = lines(400, max_tokens=4)
    pair = [batches.create(jsonl(asked)) for _ in range(2)]
    for batch in pair:
        until_some(batches, batch)
    assert not any(batches.look(batch).status.over for batch in pair)
    for batch in pair:
        assert batches.until_over(batch).status == "completed"
        batches.check(batch, asked)


def test_a_preempted_line_goes_on_with_its_tokens(new_fleet: Fleet, batches: Batches) -> None:
    """A pool that is too small for what runs: lines are evicted and begin again."""
    new_fleet.worker(Role.PREFILL, block_size=4, null=SLOW)
    new_fleet.worker(Role.DECODE, blocks=24, block_size=4, null=SLOW)
    worker = new_fleet.batch_worker(batches.files_dir)
    asked = lines(24, max_tokens=24)
    batch = batches.create(jsonl(asked))
    assert batches.until_over(batch).status == "completed"
    batches.check(batch, asked)
    assert "Traceback" not in worker.log


# What else may stand in RQ's queue.


def put(batches: Batches, job_id: str, data: bytes, **fields: str) -> str:
    """A job of whoever can write to Redis; its key."""
    redis, queue = batches.jobs.redis, batches.jobs.queue
    stored: dict[Any, Any] = {"data": data, "status": "queued", "origin": queue.name, **fields}
    redis.hset(Job.key_for(job_id), mapping=stored)
    redis.lpush(queue.key, job_id)
    return Job.key_for(job_id)


class Bomb:
    """Writes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return exec, (f"open({str(self.path)!r}, 'w').close()",)


def test_nobody_s_code_is_run_for_being_in_the_queue(new_fleet: Fleet, batches: Batches, tmp_path: Path) -> None:
    touched = tmp_path / "touched"
    ours, name, other = "prelay_batch.job.run_batch", "batch_" + "0" * 24, "batch_" + "1" * 24
    jobs = [
        put(batches, "pickled", pickle.dumps(Bomb(touched))),
        put(batches, "pickled-call", pickle.dumps(("os.system", None, (f"touch {touched}",), {}))),
        put(batches, "foreign", orjson.dumps(["os.system", None, [f"touch {touched}"], {}])),
        put(batches, "no-id", orjson.dumps([ours, None, ["no-id"], {}])),
        put(batches, name, orjson.dumps([ours, None, [name], {}]), failure_callback_name="os.abort"),
        put(batches, other, orjson.dumps([ours, None, [name], {}])),
    ]
    put(batches, "../../etc", orjson.dumps([ours, None, ["../../etc"], {}]))  # RQ itself stumbles over it
    new_fleet.worker(Role.UNIFIED)
    worker = new_fleet.batch_worker(batches.files_dir)
    asked = lines(3)
    assert batches.until_over(batches.create(jsonl(asked))).status == "completed"
    until(lambda: [batches.jobs.redis.hget(key, "status") for key in jobs] == [b"failed"] * len(jobs))
    assert not touched.exists()
    assert worker.log.count("is refused") == len(jobs)
    assert worker.log.count("stumbled") <= 1, worker.log
    assert worker.stop() == 0
