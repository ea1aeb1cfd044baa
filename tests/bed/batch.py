"""Batches of the tests' own: put on disk and into Redis as the API puts them, and what must hold of their end."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson

from prelay_files.folder import BatchFolder
from prelay_files.ids import new_batch_id
from prelay_files.record import BatchRecord
from prelay_files.store import FileStore
from prelay_queue.batch_jobs import BatchJobs
from prelay_queue.batches import BatchScripts, BatchState
from prelay_queue.client import SyncQueue
from prelay_queue.settings import QueueSettings

from .chain import expected_chain
from .processes import until
from .tokenizer import ids_of

COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"


def line(custom_id: str, prompt: Sequence[int], max_tokens: int = 8, **more: Any) -> dict[str, Any]:
    """A line of a batch of completions."""
    body = {"model": "null", "prompt": list(prompt), "max_tokens": max_tokens, **more}
    return {"custom_id": custom_id, "method": "POST", "url": COMPLETIONS, "body": body}


def lines(count: int, max_tokens: int = 8) -> list[dict[str, Any]]:
    """Lines with prompts of their own."""
    return [line(f"line {n}", (n % 1000, n // 1000 % 1000, 7), max_tokens) for n in range(count)]


def jsonl(rows: Iterable[dict[str, Any]]) -> bytes:
    return b"".join(orjson.dumps(row, option=orjson.OPT_APPEND_NEWLINE) for row in rows)


@dataclass
class Batches:
    """The batches of one fleet; `files_dir` is where their files are."""

    settings: QueueSettings
    files_dir: Path
    queue: SyncQueue = field(init=False)
    jobs: BatchJobs = field(init=False)

    def __post_init__(self) -> None:
        self.queue = SyncQueue(self.settings)
        self.jobs = BatchJobs(self.settings.url, self.settings.fleet)
        self.scripts = BatchScripts(self.queue.keys)
        self.store = FileStore(self.files_dir)

    def close(self) -> None:
        self.queue.close()
        self.jobs.close()

    def create(self, content: bytes, endpoint: str = COMPLETIONS, window_s: int = 86_400) -> str:
        """Upload a file and ask for its batch; the id."""
        with self.store.create("batch", "in.jsonl") as writing:
            writing.write(content)
            file_id = writing.commit().id
        return self.create_from(file_id, endpoint, window_s)

    def create_from(self, file_id: str, endpoint: str = COMPLETIONS, window_s: int = 86_400) -> str:
        """Ask for the batch of a file that is there; the id."""
        now = int(time.time())
        batch = new_batch_id()
        record = BatchRecord(batch, endpoint, file_id, window_s, now, now + window_s)
        BatchFolder.create(self.files_dir, record)
        assert self.queue.run(self.scripts.open(batch, record.encode(), window_s * 1000)) == "new"
        self.jobs.ensure(batch)
        return batch

    def look(self, batch: str) -> BatchState:
        state = self.queue.run(self.scripts.look(batch))
        assert state is not None, f"{batch} is gone"
        return state

    def watch(self, after_ms: int = 0) -> None:
        """What the watchdog of an API process does."""
        for batch in self.queue.run(self.scripts.stale(after_ms, 100)):
            self.jobs.ensure(batch)

    def until_over(self, batch: str, timeout_s: float = 60, *, watched: bool = False) -> BatchState:
        """Wait for its end; `watched`: as an API process that looks often."""

        def over() -> BatchState | None:
            if watched:
                self.watch(after_ms=200)
            state = self.look(batch)
            return state if state.status.over else None

        found: BatchState = until(over, timeout_s, every_s=0.05)
        return found

    def results(self, batch: str) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """The lines of the output file and of the error file."""
        state = self.look(batch)
        return self._lines(state.output_file), self._lines(state.error_file)

    def _lines(self, file_id: str) -> list[dict[str, Any]]:
        if not file_id:
            return []
        with self.store.open(file_id) as file:
            return [orjson.loads(raw) for raw in file]

    def check(self, batch: str, asked: Sequence[dict[str, Any]]) -> None:
        """Every line of a completed batch of `lines` stands once in the output, with the answer of the null model."""
        output, errors = self.results(batch)
        assert errors == []
        assert sorted(row["custom_id"] for row in output) == sorted(row["custom_id"] for row in asked)
        bodies = {row["custom_id"]: row["body"] for row in asked}
        for row in output:
            wanted = bodies[row["custom_id"]]
            assert row["response"]["status_code"] == 200, row
            text = row["response"]["body"]["choices"][0]["text"]
            assert ids_of(text) == expected_chain(wanted["prompt"], wanted["max_tokens"]), row
        progress = self.look(batch).progress
        assert (progress.total, progress.completed, progress.failed) == (len(asked), len(asked), 0)
        assert progress.completion_tokens == sum(row["body"]["max_tokens"] for row in asked)
        assert progress.prompt_tokens == sum(len(row["body"]["prompt"]) for row in asked)
