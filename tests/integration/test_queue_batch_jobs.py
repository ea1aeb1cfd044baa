"""The RQ jobs of batches: however RQ left one, `ensure` makes it one that will be run."""

from __future__ import annotations

import contextlib
import pickle
import secrets
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
from rq import SimpleWorker
from rq.executions import Execution
from rq.job import Job, JobStatus
from rq.registry import FailedJobRegistry, FinishedJobRegistry, StartedJobRegistry
from rq.serializers import JSONSerializer
from rq.utils import now, utcformat

from prelay_queue.batch_jobs import FUNCTION, MOVING_MS, STARTING_MS, BatchJobs
from prelay_queue.errors import QueueUnavailable
from prelay_queue.scripts import text
from tests.bed.servers import Server


@pytest.fixture
def jobs(any_server: Server) -> Iterator[BatchJobs]:
    found = BatchJobs(any_server.url, secrets.token_hex(6))
    yield found
    found.queue.delete(delete_jobs=True)
    found.close()


@pytest.fixture
def batch() -> str:
    return f"batch_{secrets.token_hex(12)}"


def waiting(jobs: BatchJobs) -> list[str]:
    found: Any = jobs.redis.lrange(jobs.queue.key, 0, -1)
    return [text(each) for each in found]


def fetch(jobs: BatchJobs, batch: str) -> Job:
    return Job.fetch(batch, connection=jobs.redis, serializer=JSONSerializer)


def check_will_run(jobs: BatchJobs, batch: str) -> None:
    """It waits, once, stands nowhere else, and says what to run."""
    assert waiting(jobs) == [batch]
    assert jobs.redis.llen(jobs.queue.intermediate_queue_key) == 0
    for registry in (StartedJobRegistry, FailedJobRegistry, FinishedJobRegistry):
        assert jobs.redis.zcard(registry(queue=jobs.queue).key) == 0
    job = fetch(jobs, batch)
    assert (job.func_name, list(job.args), job.kwargs) == (FUNCTION, [batch], {})
    assert job.get_status() == JobStatus.QUEUED
    assert (job.timeout, job.retries_left, job.result_ttl) == (-1, 5, 0)
    assert jobs.ensure(batch) is False, "a repeat changes nothing"
    assert waiting(jobs) == [batch]
    assert not list(jobs.redis.scan_iter("prelay-batch:*lock*"))


def take(jobs: BatchJobs, batch: str) -> Job:
    """A worker takes the next job, as far as its intermediate list."""
    moved = jobs.redis.lmove(jobs.queue.key, jobs.queue.intermediate_queue_key)
    assert text(moved) == batch
    return fetch(jobs, batch)


def start(jobs: BatchJobs, batch: str, ago_ms: int) -> None:
    """And begins it, so long ago."""
    job = take(jobs, batch)
    with jobs.redis.pipeline() as pipe:
        Execution.create(job, 90, pipe, "w")
        job.prepare_for_execution("w", pipe)
        pipe.lrem(jobs.queue.intermediate_queue_key, 0, batch)
        pipe.hset(job.key, "started_at", utcformat(now() - timedelta(milliseconds=ago_ms)))
        pipe.execute()
    assert jobs.redis.zcard(StartedJobRegistry(queue=jobs.queue).key) == 1


def test_a_batch_without_a_job_gets_one(jobs: BatchJobs, batch: str) -> None:
    assert jobs.ensure(batch) is True
    check_will_run(jobs, batch)


def test_batches_are_run_in_the_order_in_which_they_came_also_when_asked_for_again(jobs: BatchJobs) -> None:
    for name in ("batch_1", "batch_2", "batch_1"):
        jobs.ensure(name)
    assert waiting(jobs) == ["batch_1", "batch_2"]


def test_a_job_that_just_begins_is_left_alone_and_one_of_a_dead_worker_is_put_back(jobs: BatchJobs, batch: str) -> None:
    jobs.ensure(batch)
    start(jobs, batch, STARTING_MS - 5_000)
    assert jobs.ensure(batch) is False
    assert waiting(jobs) == []
    jobs.redis.hset(Job.key_for(batch), "started_at", utcformat(now() - timedelta(milliseconds=STARTING_MS)))
    assert jobs.ensure(batch) is True
    check_will_run(jobs, batch)
    assert not list(jobs.redis.scan_iter(f"rq:execution*{batch}*"))


def test_a_job_that_a_worker_took_and_never_began_is_put_back_after_a_while(jobs: BatchJobs, batch: str) -> None:
    jobs.ensure(batch)
    take(jobs, batch)
    for _ in range(2):
        assert jobs.ensure(batch) is False
        assert waiting(jobs) == []
    (noted,) = jobs.redis.scan_iter(f"*moving:{batch}")
    assert 0 < jobs.redis.pttl(noted) <= 4 * MOVING_MS
    jobs.redis.decrby(noted, MOVING_MS)
    assert jobs.ensure(batch) is True
    check_will_run(jobs, batch)


def test_a_job_in_the_hash_but_in_no_list_is_put_back(jobs: BatchJobs, batch: str) -> None:
    jobs.ensure(batch)
    jobs.redis.delete(jobs.queue.key)
    assert jobs.ensure(batch) is True
    check_will_run(jobs, batch)


def test_a_job_in_the_list_but_without_a_hash_is_made_again_and_waits_once(jobs: BatchJobs, batch: str) -> None:
    jobs.ensure(batch)
    jobs.redis.rpush(jobs.queue.key, batch)
    jobs.redis.delete(Job.key_for(batch))
    assert jobs.ensure(batch) is True
    check_will_run(jobs, batch)


def test_what_a_late_heartbeat_left_of_a_deleted_job_is_no_job(jobs: BatchJobs, batch: str) -> None:
    jobs.redis.hset(Job.key_for(batch), mapping={"status": "queued", "last_heartbeat": "x"})
    jobs.redis.rpush(jobs.queue.key, batch)
    assert jobs.ensure(batch) is True
    check_will_run(jobs, batch)
    assert fetch(jobs, batch).last_heartbeat is None


def work(jobs: BatchJobs) -> None:
    """A worker of RQ's own runs what waits. The function is not here, so it fails."""
    with contextlib.closing(jobs):
        SimpleWorker([jobs.queue], connection=jobs.redis, serializer=JSONSerializer).work(burst=True)


@pytest.mark.filterwarnings("ignore")
def test_a_job_that_failed_as_often_as_it_may_is_put_back_with_all_its_tries(jobs: BatchJobs, batch: str) -> None:
    jobs.queue.enqueue_call("prelay_queue.no_such_function", args=(batch,), job_id=batch)
    work(jobs)
    assert fetch(jobs, batch).get_status() == JobStatus.FAILED
    assert jobs.ensure(batch) is True
    check_will_run(jobs, batch)


@pytest.mark.filterwarnings("ignore")
def test_a_job_that_finished_is_put_back(jobs: BatchJobs, batch: str) -> None:
    jobs.queue.enqueue_call("os.path.basename", args=(batch,), job_id=batch, result_ttl=500)
    work(jobs)
    assert fetch(jobs, batch).get_status() == JobStatus.FINISHED
    assert jobs.ensure(batch) is True
    check_will_run(jobs, batch)


@pytest.mark.parametrize("damage", [{"status": b"\xff"}, {"status": "odd"}, {"started_at": "odd", "status": "started"}])
def test_a_job_that_nobody_can_read_is_replaced(jobs: BatchJobs, batch: str, damage: dict[str, str | bytes]) -> None:
    jobs.ensure(batch)
    jobs.redis.hset(Job.key_for(batch), mapping=damage)  # type: ignore[arg-type]
    assert jobs.ensure(batch) is True
    check_will_run(jobs, batch)


def boom() -> None:
    raise AssertionError("it was unpickled")


class Boom:
    def __reduce__(self) -> Any:
        return boom, ()


def test_a_pickle_in_the_place_of_a_job_is_not_opened(jobs: BatchJobs, batch: str) -> None:
    jobs.ensure(batch)
    pickled = pickle.dumps(Boom())
    jobs.redis.hset(
        Job.key_for(batch), mapping={"data": pickled, "meta": pickled, "result": pickled, "status": "failed"}
    )
    assert jobs.ensure(batch) is True
    check_will_run(jobs, batch)


def test_of_many_who_ask_at_once_one_acts(jobs: BatchJobs, any_server: Server, batch: str) -> None:
    fleet = jobs.queue.name.removeprefix("prelay-batch-")
    others = [BatchJobs(any_server.url, fleet) for _ in range(4)]
    with ThreadPoolExecutor(16) as pool:
        acted = list(pool.map(lambda number: others[number % 4].ensure(batch), range(64)))
    assert acted.count(True) == 1
    check_will_run(jobs, batch)
    for other in others:
        other.close()


def test_a_lock_of_a_process_that_died_ends(jobs: BatchJobs, batch: str) -> None:
    lock = f"prelay-batch:{{{jobs.queue.name.removeprefix('prelay-batch-')}}}:lock:{batch}"
    jobs.redis.set(lock, "dead", px=5_000)
    assert jobs.ensure(batch) is False
    jobs.redis.pexpire(lock, 1)
    while jobs.redis.exists(lock):
        pass
    assert jobs.ensure(batch) is True


def test_a_forgotten_batch_leaves_nothing_but_the_name_of_the_queue(jobs: BatchJobs, batch: str) -> None:
    jobs.ensure(batch)
    start(jobs, batch, 0)
    jobs.forget(batch)
    assert not list(jobs.redis.scan_iter(f"*{batch}*"))
    assert jobs.redis.zcard(StartedJobRegistry(queue=jobs.queue).key) == 0
    jobs.forget(batch)


def test_fleets_do_not_see_each_others_jobs(jobs: BatchJobs, any_server: Server, batch: str) -> None:
    other = BatchJobs(any_server.url, secrets.token_hex(6))
    other.ensure(batch)
    assert waiting(jobs) == []
    other.queue.delete(delete_jobs=True)
    other.close()


def test_a_server_that_is_away_is_said_to_be(own_server: Server, batch: str) -> None:
    jobs = BatchJobs(own_server.url, "f")
    own_server.kill()
    for ask in (jobs.ensure, jobs.forget):
        with pytest.raises(QueueUnavailable):
            ask(batch)
    own_server.start()
    assert jobs.ensure(batch) is True
    jobs.close()
