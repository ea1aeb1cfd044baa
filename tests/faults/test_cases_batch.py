"""Faults of batches from public reports (shared cases api-batch 15–19), with null workers and real kills."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path

import orjson
import psutil
import pytest

from prelay_files.folder import BatchFolder
from prelay_queue.batches import BatchStatus
from prelay_queue.scripts import text
from prelay_queue.settings import QueueTimes
from prelay_worker.config import NullModel, Role
from tests.bed.batch import Batches, jsonl, lines
from tests.bed.processes import Fleet, Process, fleet, until
from tests.bed.servers import Server
from tests.bed.tokenizer import make_tokenizer
from tests.faults.fleet import TIMES

#: A batch lease of a second and a half instead of ten.
LEASE_MS = 1_500
TOKENS = 6


class Bed:
    """A fleet with batch workers, and an API process's watchdog played by the test."""

    def __init__(self, server: Server, folder: Path, times: QueueTimes = TIMES) -> None:
        self.server = server
        self._fleet = fleet(server.settings(times=times), make_tokenizer(folder / "model"))
        self.fleet: Fleet = self._fleet.__enter__()
        self.batches = Batches(self.fleet.queue, folder / "files")
        self.runners: list[Process] = []

    def close(self) -> None:
        self.batches.close()
        self._fleet.__exit__(None, None, None)

    def runner(self) -> Process:
        found = self.fleet.batch_worker(self.batches.files_dir, lease_ms=LEASE_MS)
        self.runners.append(found)
        return found

    def horses(self) -> list[psutil.Process]:
        """The work horses of all batch workers."""
        return [child for runner in self.runners if runner.code is None for child in children(runner)]

    def until_done(self, batch: str, count: int) -> None:
        """Watched as by an API process: a runner may be told to stop with the batch just out of RQ's queue."""

        def done() -> bool:
            self.batches.watch(after_ms=200)
            return self.batches.look(batch).progress.completed >= count

        until(done, 60, every_s=0.02)

    def computed(self) -> int:
        """Tokens, of prompts and answers, that the workers have computed, when nothing runs."""
        queue = self.batches.queue
        keys = queue.keys
        seconds, micros = queue.redis.time()
        since = int(seconds) * 1000 + int(micros) // 1000

        def beats() -> list[dict[str, int]] | None:
            names = [text(name) for name in queue.redis.zrange(keys.workers, 0, -1)]
            found = [orjson.loads(queue.redis.get(keys.worker(name)) or b'{"t":0}') for name in names]
            return found if all(beat["t"] > since for beat in found) else None

        return sum(beat["computed_tokens"] for beat in until(beats, 10) or ())


@pytest.fixture
def bed(own_server: Server, tmp_path: Path) -> Iterator[Bed]:
    found = Bed(own_server, tmp_path)
    yield found
    found.close()


def children(process: Process) -> list[psutil.Process]:
    try:
        return psutil.Process(process.pid).children()
    except psutil.NoSuchProcess:
        return []


def cost_of_a_line(bed: Bed) -> int:
    """Tokens that a worker computes for one line that nothing disturbs."""
    asked = lines(10, TOKENS)
    batch = bed.batches.create(jsonl(asked))
    bed.batches.until_over(batch)
    bed.batches.check(batch, asked)
    each, rest = divmod(bed.computed(), 10)
    assert rest == 0
    return each


def kill_the_runner(bed: Bed) -> None:
    """Its work horse dies with it; the supervisor starts another."""
    horses = bed.horses()
    assert horses, "no batch runs"
    bed.runners[0].kill()
    psutil.wait_procs(horses, 5)
    bed.runners[0] = bed.runner()
    bed.runners.pop()


def kill_the_horse(bed: Bed) -> None:
    (horse,) = bed.horses()
    horse.kill()


def kill_redis(bed: Bed) -> None:
    bed.server.kill()
    bed.server.start()


@pytest.mark.slow
@pytest.mark.parametrize("kill", [kill_the_runner, kill_the_horse, kill_redis])
def test_a_batch_of_which_half_is_done_survives_a_kill_without_computing_a_line_twice(
    bed: Bed, kill: Callable[[Bed], None]
) -> None:
    """llm-d-batch-gateway#645, rq#2424: a runner, its work horse or Redis dies at 50 % of 2,000 lines."""
    bed.fleet.worker(Role.UNIFIED, null=NullModel(step_ms=4))
    bed.runner()
    each = cost_of_a_line(bed)
    asked = lines(2_000, TOKENS)
    batch = bed.batches.create(jsonl(asked))
    bed.until_done(batch, 1_000)
    kill(bed)
    state = bed.batches.until_over(batch, 60, watched=True)
    assert state.status is BatchStatus.COMPLETED
    bed.batches.check(batch, asked)
    if kill is not kill_redis:  # what its workers had not said when it died they say again, or compute again
        assert bed.computed() == each * (10 + len(asked))


@pytest.mark.slow
def test_two_runners_of_one_batch_make_each_line_once(bed: Bed) -> None:
    """llm-d-batch-gateway#644: one is frozen until another has taken over, and goes on in the middle of that."""
    bed.fleet.worker(Role.UNIFIED, null=NullModel(step_ms=40), max_running=4)
    bed.runner()
    asked = lines(64, TOKENS)
    batch = bed.batches.create(jsonl(asked))
    bed.until_done(batch, 10)
    frozen = [psutil.Process(bed.runners[0].pid), *bed.horses()]
    for process in frozen:
        process.suspend()
    bed.runner()

    def taken_over() -> bool:
        bed.batches.watch(after_ms=200)
        return bed.batches.look(batch).epoch > 1

    until(taken_over, 30)
    bed.until_done(batch, 20)
    for process in frozen:
        process.resume()
    assert bed.batches.until_over(batch, 60, watched=True).status is BatchStatus.COMPLETED
    bed.batches.check(batch, asked)
    assert [len(found) for found in bed.batches.results(batch)] == [64, 0]


@pytest.mark.slow
def test_a_cancelled_batch_has_each_line_in_one_of_its_files(bed: Bed) -> None:
    """llm-d-batch-gateway#504: cancelled at random points, output and errors are a partition of the lines."""
    bed.fleet.worker(Role.UNIFIED, null=NullModel(step_ms=4), max_running=2)  # 300 lines take seconds
    bed.runner()
    bed.runner()
    chance = random.Random(5)
    asked = lines(300, TOKENS)
    ids = {row["custom_id"] for row in asked}
    parts = []
    for _ in range(8):
        batch = bed.batches.create(jsonl(asked))
        bed.until_done(batch, chance.randrange(250))
        bed.batches.queue.run(bed.batches.scripts.cancel(batch))
        state = bed.batches.until_over(batch)
        output, errors = bed.batches.results(batch)
        done, refused = [row["custom_id"] for row in output], [row["custom_id"] for row in errors]
        assert len(done) + len(refused) == len(asked) == state.progress.total
        assert {*done} | {*refused} == ids
        assert (len(done), len(refused)) == (state.progress.completed, state.progress.failed)
        assert {row["error"]["code"] for row in errors} <= {"batch_cancelled"}
        parts.append(len(done))
    assert len(set(parts)) > 3, f"the cancels all came at one point: {parts}"


@pytest.mark.parametrize("known_to", ["redis", "disk"])
def test_a_cancel_that_no_runner_hears_is_carried_out_by_the_next(bed: Bed, known_to: str) -> None:
    """The disk alone knows it after a Redis that lost its data."""
    bed.fleet.worker(Role.UNIFIED)
    asked = lines(20, TOKENS)
    batch = bed.batches.create(jsonl(asked))
    if known_to == "redis":
        bed.batches.queue.run(bed.batches.scripts.cancel(batch))
    else:
        BatchFolder(bed.batches.files_dir, batch).ask_cancel()
    bed.runner()
    assert bed.batches.until_over(batch).status is BatchStatus.CANCELLED
    output, errors = bed.batches.results(batch)
    assert (output, len(errors)) == ([], 20)


@pytest.mark.slow
def test_a_batch_goes_on_elsewhere_when_its_worker_is_told_to_stop(bed: Bed) -> None:
    """SIGTERM in the middle, again and again: nothing is lost, nothing is computed twice, nothing fails."""
    bed.fleet.worker(Role.UNIFIED, null=NullModel(step_ms=4))
    bed.runner()
    each = cost_of_a_line(bed)
    asked = lines(1_500, TOKENS)
    batch = bed.batches.create(jsonl(asked))
    for share in (200, 500, 800, 1_100):
        bed.until_done(batch, share)
        assert bed.runners.pop().stop() == 0
        bed.runner()
    assert bed.batches.until_over(batch, 60, watched=True).status is BatchStatus.COMPLETED
    bed.batches.check(batch, asked)
    assert bed.computed() == each * (10 + len(asked))


@pytest.mark.slow
def test_batches_leave_no_key_and_no_process_behind(bed: Bed) -> None:
    worker = bed.fleet.worker(Role.UNIFIED)
    bed.runner()
    asked = lines(200, TOKENS)
    for _ in range(3):
        batch = bed.batches.create(jsonl(asked))
        bed.batches.until_over(batch)
        bed.batches.check(batch, asked)
    horses = bed.horses()
    for runner in bed.runners:
        assert runner.stop() == 0
    assert worker.stop() == 0
    assert not [horse for horse in horses if horse.is_running() and horse.status() != psutil.STATUS_ZOMBIE]
    queue = bed.batches.queue
    names = [text(name).removeprefix(queue.keys.prefix) for name in queue.redis.keys(f"{queue.keys.prefix}*")]
    lasting = [name for name in names if queue.redis.pttl(f"{queue.keys.prefix}{name}") == -1]
    assert {name.partition(":")[0] for name in lasting} <= {"work", "domains"}, lasting
    assert not [name for name in names if name.startswith(("job:", "log:", "live:"))], names
