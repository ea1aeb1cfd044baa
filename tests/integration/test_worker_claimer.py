"""The claim thread on a real server, with a test in the place of the model loop."""

from __future__ import annotations

import queue
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from prelay_queue import failpoints
from prelay_queue.client import SyncQueue
from prelay_queue.job import Claim, Priority
from prelay_queue.keys import GROUP
from prelay_worker.admission import Admission
from prelay_worker.claimer import MOST_AT_ONCE, Claimer
from prelay_worker.config import Role
from prelay_worker.lease import LeaseKeeper
from prelay_worker.messages import Claimed, Message
from prelay_worker.policy import Opening
from tests.bed.processes import fast_times, until
from tests.bed.servers import Server
from tests.integration.queue_desk import JOB, P1, ServerDesk, new_job
from tests.unit.worker.desk import make_worker

ME = "me:1:a"


class Claiming:
    """A claim thread with as much room as the test gives it."""

    def __init__(self, server: Server) -> None:
        self.desk = ServerDesk(server.settings(times=fast_times()), checked=False)
        self.queue = SyncQueue(self.desk.settings)
        self.inbox: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self.admission = Admission(4)
        self.opening, self.spared_slots = Opening(room=3), 0
        transport = make_worker(Role.PREFILL)[0].backend.transport
        self.leases = LeaseKeeper(self.queue, ME, transport, self.inbox.put)
        self.claimer = Claimer(self.queue, ME, "prefill", self.admission, self.leases, self.inbox.put)
        self.claimer.start()

    def open(self, slots: int = 1) -> None:
        """The model loop has turned: there is room, and it has what was claimed before."""
        self.admission.publish(10_000, slots, self.opening, spared_slots=self.spared_slots)

    def next(self, slots: int = 1) -> Claim:
        """The next job, whenever it comes; the loop goes on turning, with room for one at a time."""

        def claimed() -> Claim | None:
            self.open(slots)
            try:
                message = self.inbox.get(timeout=0.02)
            except queue.Empty:
                return None
            assert isinstance(message, Claimed)
            self.admission.settle(f"{message.claim.id}@{message.claim.epoch}")
            return message.claim

        found = until(claimed)
        assert isinstance(found, Claim)
        return found

    def close(self) -> None:
        self.claimer.stop()
        self.queue.close()
        self.desk.close()


@pytest.fixture
def claiming(own_server: Server) -> Iterator[Claiming]:
    found = Claiming(own_server)
    yield found
    failpoints.arm("")
    own_server.client.config_set("maxmemory", 0)
    found.close()


def test_a_job_is_claimed_leased_and_given_to_the_model_loop(claiming: Claiming) -> None:
    claiming.desk.submit()
    claim = claiming.next()
    assert (claim.id, claim.epoch) == (JOB, 1)
    assert claiming.leases._held == {(JOB, 1): "run"}
    assert claiming.desk.fields()["ow"] == ME


def test_nothing_is_claimed_while_there_is_no_room(claiming: Claiming) -> None:
    claiming.desk.submit(new_job("a/0"), new_job("b/0"))
    claiming.open()
    until(lambda: not claiming.inbox.empty())
    claiming.open()  # the loop turns, and has not taken it yet
    stream = claiming.desk.keys.work("prefill")[3]
    until(lambda: claiming.desk.redis.xlen(stream) == 1)
    assert claiming.desk.fields("b/0")["st"] == "queued"


def test_an_entry_that_a_dead_worker_took_along_is_found_however_often_the_thread_turned(
    claiming: Claiming,
) -> None:
    for n in range(5):
        claiming.desk.submit(new_job(f"a{n}/0"))
        claiming.next()
        # Handed to a worker that dies before it claims. No other job comes.
        claiming.admission.publish(0, 0, Opening())
        claiming.desk.submit(new_job(f"b{n}/0"))
        until(lambda: _deliver_to_the_dead(claiming))
        assert claiming.next().id == f"b{n}/0"


def _deliver_to_the_dead(claiming: Claiming) -> bool:
    """The claim thread may be in its blocking read, and take it; then it is what it should be already."""
    stream = claiming.desk.keys.work("prefill")[3]
    return bool(claiming.desk.redis.xreadgroup(GROUP, "dead", {stream: ">"}, count=1)) or not claiming.inbox.empty()


@pytest.mark.parametrize("fault", ["claim.after=cut", "claim.before=cut", "claim.after=cut@2"])
def test_a_claim_whose_answer_never_came_is_made_once(claiming: Claiming, fault: str) -> None:
    failpoints.arm(fault)
    claiming.desk.queue = SyncQueue(claiming.desk.settings)
    jobs = ["a/0", "b/0"]
    claiming.desk.submit(*map(new_job, jobs))
    claims = [claiming.next() for _ in jobs]
    assert sorted(claim.id for claim in claims) == jobs
    assert {claim.epoch for claim in claims} == {1}
    assert sorted(claiming.leases._held) == [(job, 1) for job in jobs]
    claiming.desk.submit(new_job("last/0"))
    assert claiming.next().id == "last/0"


def test_entries_of_our_own_that_an_error_hid_are_found_again(claiming: Claiming) -> None:
    claiming.desk.submit()
    claiming.desk.deliver(ME)  # as if the reply had been lost
    failpoints.arm("claim.before=cut")
    claiming.desk.submit(new_job("other/0"))
    assert {claiming.next().id, claiming.next().id} == {JOB, "other/0"}


@pytest.mark.parametrize("damage", ["destroy", "delete"])
def test_the_thread_makes_its_groups_again_even_when_the_server_is_full_for_a_while(
    claiming: Claiming, own_server: Server, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    desk = claiming.desk
    desk.submit(new_job("before/0"))
    assert claiming.next().id == "before/0"
    own_server.client.config_set("maxmemory", 1)
    for stream in desk.keys.work("prefill"):
        if damage == "destroy":
            desk.redis.xgroup_destroy(stream, GROUP)
        else:
            desk.redis.delete(stream)
    claiming.open()
    until(lambda: "command not allowed when used memory" in caplog.text)
    own_server.client.config_set("maxmemory", 0)
    desk.submit(new_job("after/0"))
    assert claiming.next().id == "after/0"


def test_an_entry_that_names_no_job_is_dropped_and_the_thread_goes_on(claiming: Claiming) -> None:
    stream = claiming.desk.keys.work("prefill")[0]
    claiming.desk.redis.xadd(stream, {"x": "y"})
    claiming.desk.redis.xadd(stream, {"id": "unknown/0"})
    claiming.desk.submit()
    assert claiming.next().id == JOB
    assert claiming.desk.redis.xlen(stream) == 0


def test_a_job_of_a_newer_protocol_is_left_and_does_not_stand_in_the_way(claiming: Claiming) -> None:
    claiming.desk.submit(new_job("newer/0"), new_job("ours/0"))
    claiming.desk.redis.hset(claiming.desk.keys.job("newer/0"), "v", 99)
    assert claiming.next().id == "ours/0"
    fields = claiming.desk.fields("newer/0")
    assert (fields["st"], fields["cr"]) == ("queued", "0")


def test_higher_classes_come_first_and_the_lower_ones_do_not_starve(claiming: Claiming) -> None:
    count = 20
    for priority in Priority:
        claiming.desk.submit(*(new_job(f"{priority}-{n}/0", priority=priority) for n in range(count)))
    order = [claiming.next().id.partition("-")[0] for _ in range(2 * count)]
    assert order.count("interactive") >= 0.6 * count
    assert order[:5].count("interactive") >= 3
    assert order.count("normal") >= 2
    assert order.count("batch") >= 1


@pytest.mark.parametrize("unserved", [True, False])
def test_a_batch_job_that_urgent_ones_would_always_pass_has_its_turn_where_none_is_served(
    claiming: Claiming, unserved: bool
) -> None:
    """There is never more room than the headroom, and always an urgent job that takes it."""
    claiming.opening, claiming.spared_slots = Opening(room=3, unserved=unserved), 1
    claiming.admission.publish(0, 0, Opening())
    claiming.desk.submit(*(new_job(f"low-{n}/0", priority=Priority.BATCH) for n in range(3)))
    claiming.desk.submit(*(new_job(f"high-{n}/0", priority=Priority.INTERACTIVE) for n in range(21)))
    claims = [claiming.next().id for _ in range(20)]
    assert sum(claim.startswith("low") for claim in claims) == 2 * unserved


def test_a_batch_job_that_nobody_passes_stays_in_the_queue_for_who_has_the_room(claiming: Claiming) -> None:
    claiming.opening, claiming.spared_slots = Opening(room=3, unserved=True), 1
    claiming.desk.submit(new_job("low/0", priority=Priority.BATCH))
    seen = claiming.claimer._turn + 20

    def turned() -> bool:
        claiming.open()
        return claiming.claimer._turn > seen

    until(turned)
    assert claiming.desk.fields("low/0")["st"] == "queued"


def test_where_there_is_no_room_a_job_is_claimed_only_of_the_classes_for_which_some_would_be_made(
    claiming: Claiming,
) -> None:
    desk = claiming.desk
    claiming.opening = Opening(room=3, full=2)
    desk.submit(new_job("low/0", priority=Priority.BATCH), new_job("high/0", priority=Priority.INTERACTIVE))
    assert claiming.next(slots=0).id == "high/0"
    desk.submit(new_job("middle/0"))
    assert claiming.next(slots=0).id == "middle/0"
    assert desk.fields("low/0")["st"] == "queued"
    assert claiming.next(slots=1).id == "low/0"


def test_an_urgent_entry_that_a_dead_worker_took_along_is_found_by_one_without_room(claiming: Claiming) -> None:
    desk = claiming.desk
    claiming.opening = Opening(room=3, full=2)
    desk.submit(new_job("low/0", priority=Priority.BATCH))
    desk.deliver("dead")
    desk.submit(new_job("high/0", priority=Priority.INTERACTIVE))
    desk.deliver("dead")
    assert claiming.next(slots=0).id == "high/0"
    assert desk.fields("low/0")["st"] == "queued"
    assert claiming.next(slots=1).id == "low/0"


def test_a_restarted_job_comes_before_the_new_ones_of_its_class(claiming: Claiming) -> None:
    desk = claiming.desk
    claiming.admission.publish(0, 0, Opening())
    desk.submit(new_job("old/0"))
    stream, entry, job = desk.deliver(P1)
    desk.run(desk.scripts.claim(stream, entry, job, P1, 1))
    desk.submit(new_job("new/0"))
    desk.crash("old/0")
    assert [claiming.next().id, claiming.next().id] == ["old/0", "new/0"]


def _queue_up(claiming: Claiming, count: int, **changes: Any) -> list[str]:
    jobs = [f"j{n:03}/0" for n in range(count)]
    claiming.admission.publish(0, 0, Opening())
    claiming.desk.submit(*(new_job(job, **changes) for job in jobs))
    return jobs


def _claimed_in_one_turn(claiming: Claiming, slots: int) -> int:
    claiming.open(slots)
    until(lambda: len(claiming.admission._inflight) > 0 and claiming.claimer._asked == [])
    count = len(claiming.admission._inflight)
    claiming.admission.publish(0, 0, Opening())
    return count


def test_of_a_long_queue_a_sixteenth_is_claimed_at_a_time_and_each_job_once(claiming: Claiming) -> None:
    jobs = _queue_up(claiming, 80)
    assert _claimed_in_one_turn(claiming, slots=20) >= 5
    claims = [claiming.next(slots=20) for _ in jobs]
    assert [claim.id for claim in claims] == jobs, "in the order of the queue"
    assert sorted(claiming.leases._held) == [(job, 1) for job in jobs]


def test_a_short_queue_goes_round_the_workers_job_by_job(claiming: Claiming) -> None:
    _queue_up(claiming, 80)
    stream = claiming.desk.keys.work("prefill")[3]
    assert claiming.claimer._at_once(stream, 31) == 1
    claiming.open(slots=99)
    assert claiming.claimer._at_once(stream, 32) == 2
    assert claiming.claimer._at_once(stream, 10_000) == MOST_AT_ONCE


def test_a_job_that_runs_alone_is_not_claimed_together_with_others(claiming: Claiming) -> None:
    stream = claiming.desk.keys.work("prefill")[2]
    for al in ("0", "0", "1", "0"):
        claiming.desk.redis.xadd(stream, {"id": "nobody/0", "tok": 3, "al": al})
    claiming.admission.publish(9_999, 99, Opening())
    assert claiming.claimer._at_once(stream, 64) == 2


@pytest.mark.parametrize("fault", ["claim.after=cut@3", "claim.before=cut@3"])
def test_claims_of_several_whose_answers_never_came_are_made_once(claiming: Claiming, fault: str) -> None:
    failpoints.arm(fault)
    jobs = _queue_up(claiming, 96)
    claims = [claiming.next(slots=20) for _ in jobs]
    assert sorted(claim.id for claim in claims) == jobs
    assert {claim.epoch for claim in claims} == {1}
    assert sorted(claiming.leases._held) == [(job, 1) for job in jobs]


def test_a_job_that_nobody_can_read_does_not_keep_those_from_the_worker_that_were_claimed_with_it(
    claiming: Claiming,
) -> None:
    jobs = _queue_up(claiming, 64)
    claiming.desk.redis.hset(claiming.desk.keys.job(jobs[1]), "spec", "{}")
    claims = [claiming.next(slots=20) for _ in jobs[1:]]
    assert [claim.id for claim in claims] == [jobs[0], *jobs[2:]]


def test_a_thread_that_fails_ends_its_process() -> None:
    code = (
        "import threading, time\n"
        "from prelay_worker import process\n"
        "threading.excepthook = process._end_with_thread\n"
        "threading.Thread(target=lambda: 1 / 0, name='claim').start()\n"
        "time.sleep(20)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], stderr=subprocess.PIPE, check=False, timeout=15)
    assert done.returncode == 1
    assert b"thread claim failed: the worker ends" in done.stderr
    assert b"ZeroDivisionError" in done.stderr
