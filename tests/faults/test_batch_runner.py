"""Batch runners that are killed, frozen, told to stop or left without Redis: each line is answered once, and right.

The null worker counts the tokens that it computes, so a line that was computed twice shows.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import orjson
import psutil
import pytest

from prelay_queue import batch_jobs
from prelay_queue.scripts import text
from prelay_worker.config import NullModel, Role
from tests.bed.batch import Batches, jsonl, lines
from tests.bed.processes import Fleet, Process, fast_times, fleet, until
from tests.bed.servers import Server
from tests.bed.tokenizer import make_tokenizer

#: A batch of these takes some seconds.
LINES, TOKENS = 180, 6
NULL = NullModel(step_ms=25)
#: Of a runner that is gone, in ms, where the product waits ten seconds.
LEASE_MS = 1_500


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch that RQ takes for running, and nobody has, is soon one to be run again."""
    monkeypatch.setattr(batch_jobs, "STARTING_MS", 1_000)


class Bed:
    """A null worker, and batch workers that are to have trouble."""

    def __init__(self, found: Fleet, folder: Path) -> None:
        self.fleet = found
        self.batches = Batches(found.queue, folder / "files")
        found.worker(Role.UNIFIED, null=NULL, max_running=16)
        self.asked = lines(LINES, TOKENS)

    def runner(self, faults: str = "") -> Process:
        return self.fleet.batch_worker(self.batches.files_dir, faults, lease_ms=LEASE_MS)

    def create(self) -> str:
        return self.batches.create(jsonl(self.asked))

    def computed(self) -> int:
        """Tokens that the worker has computed up to now, prompts' and answers'."""
        redis, keys = self.batches.queue.redis, self.batches.queue.keys
        seconds, micros = redis.time()
        now = int(seconds) * 1000 + int(micros) // 1000

        def beat() -> dict[str, Any] | None:
            (name,) = redis.zrange(keys.workers, 0, -1)
            found: dict[str, Any] = orjson.loads(redis.get(keys.worker(text(name))) or b"{}")
            return found if found and found["t"] > now else None

        return int(until(beat)["computed_tokens"])

    def check(self, batch: str, *, once: bool = True) -> None:
        """The batch is complete; `once`: nothing at all was computed twice."""
        assert self.batches.until_over(batch, watched=True).status == "completed"
        self.batches.check(batch, self.asked)
        if once:
            # The first token of an answer comes with its prompt.
            wanted = sum(len(row["body"]["prompt"]) + row["body"]["max_tokens"] - 1 for row in self.asked)
            assert self.computed() == wanted


@contextmanager
def bed(server: Server, folder: Path) -> Iterator[Bed]:
    model = make_tokenizer(folder / "model")
    with fleet(server.settings(times=fast_times(api_grace_ms=30_000)), model) as found:
        made = Bed(found, folder)
        yield made
        made.batches.close()


def horse_of(worker: Process) -> int:
    """The process that runs the batch."""
    found: list[Any] = until(lambda: psutil.Process(worker.pid).children())
    return int(found[0].pid)


def until_going(made: Bed, batch: str, count: int = 20) -> None:
    until(lambda: made.batches.look(batch).progress.completed >= count)


POINTS = (
    "batch.submit.before=die@2",
    "batch.submit.after=die@3",
    "batch.append.before=die@50",
    "batch.append.after=die@90",
    "batch.checkpoint.before=die@3",
    "batch.checkpoint.after=die@2",
    "batch_keep.before=die@3",
    "batch_keep.after=die@3",
    "batch_take.after=die",
    "batch.assemble.before=die",
    "batch.assemble.after=die",
    "batch_end.before=die",
    "batch_end.after=die",
)


@pytest.mark.slow
@pytest.mark.parametrize("faults", POINTS)
def test_wherever_a_runner_dies_each_line_is_computed_and_answered_once(
    shared_server: Server, tmp_path: Path, faults: str
) -> None:
    with bed(shared_server, tmp_path) as made:
        dying = made.runner(faults)
        batch = made.create()
        dying.wait_for(f"failpoint {faults.partition('=')[0]}: die")
        assert dying.stop() == 0  # RQ gives the batch to the same worker again and again
        made.runner()
        made.check(batch)


@pytest.mark.slow
@pytest.mark.parametrize("whole", [False, True], ids=["its work horse", "both its processes"])
def test_a_runner_killed_in_the_middle_is_followed_by_another(
    shared_server: Server, tmp_path: Path, whole: bool
) -> None:
    with bed(shared_server, tmp_path) as made:
        worker = made.runner()
        batch = made.create()
        until_going(made, batch)
        horse = horse_of(worker)
        if whole:
            made.runner()
            worker.kill()
            until(lambda: not psutil.pid_exists(horse))
        else:
            os.kill(horse, signal.SIGKILL)
        made.check(batch)


@pytest.mark.slow
@pytest.mark.parametrize("point", ["batch.submit.after", "batch.checkpoint.before"])
def test_a_frozen_runner_is_replaced_and_writes_nothing_when_it_thaws(
    shared_server: Server, tmp_path: Path, point: str
) -> None:
    with bed(shared_server, tmp_path) as made:
        frozen = made.runner(f"{point}=stop@2")
        batch = made.create()
        frozen.wait_for(f"failpoint {point}: stop")
        horse = horse_of(frozen)
        made.runner()

        def taken_over() -> bool:
            made.batches.watch(after_ms=200)
            return made.batches.look(batch).epoch > 1

        until(taken_over)
        os.kill(horse, signal.SIGCONT)
        frozen.wait_for("the lease on the batch is lost")
        made.check(batch)


def test_a_runner_that_is_told_to_stop_hands_its_batch_on_at_once(shared_server: Server, tmp_path: Path) -> None:
    with bed(shared_server, tmp_path) as made:
        worker = made.runner()
        batch = made.create()
        until_going(made, batch)
        assert worker.stop() == 0
        state = made.batches.look(batch)
        assert (state.status, state.lease_left_ms <= 0) == ("in_progress", True)
        made.runner()
        made.check(batch)


@pytest.mark.slow
@pytest.mark.parametrize("lose", [Server.kill, None], ids=["killed", "flushed"])
def test_a_redis_that_goes_away_or_forgets_delays_a_batch_and_no_more(
    own_server: Server, tmp_path: Path, lose: Callable[[Server], None] | None
) -> None:
    with bed(own_server, tmp_path) as made:
        made.runner()
        batch = made.create()
        until_going(made, batch)
        if lose is None:
            own_server.client.flushall()
        else:
            lose(own_server)
            own_server.start()
        until(lambda: made.batches.queue.run(made.batches.scripts.look(batch)))
        made.check(batch, once=False)


@pytest.mark.slow
def test_all_at_once_a_runner_a_work_horse_a_worker_and_redis(own_server: Server, tmp_path: Path) -> None:
    with bed(own_server, tmp_path) as made:
        first, second = made.runner(), made.runner()
        batch = made.create()
        until_going(made, batch)
        holder = first if psutil.Process(first.pid).children() else second
        os.kill(horse_of(holder), signal.SIGKILL)
        until_going(made, batch, LINES // 3)
        made.fleet.processes[0].kill()
        made.fleet.worker(Role.UNIFIED, null=NULL, max_running=16)
        holder.kill()
        own_server.kill()
        own_server.start()
        made.check(batch, once=False)
