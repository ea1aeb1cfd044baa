"""The lease thread's decisions: what a renewal's answers mean, when it renews, when it sweeps."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

from prelay_kv.errors import CudaError
from prelay_queue.errors import QueueUnavailable
from prelay_queue.keys import Keys
from prelay_queue.scripts import Call, Reaped, Scripts
from prelay_queue.settings import QueueSettings, QueueTimes
from prelay_worker import lease
from prelay_worker.backend import Transport
from prelay_worker.config import Role
from prelay_worker.lease import LeaseKeeper
from prelay_worker.messages import Message, Release, Stop
from tests.unit.worker.desk import make_worker

TIMES = QueueTimes(lease_ms=1000, stall_ms=5000)


class FakeQueue:
    def __init__(self) -> None:
        self.settings = QueueSettings("unix:///nowhere", "t", times=TIMES)
        self.scripts = Scripts(Keys("t"))
        self.keys = Keys("t")
        self.sent: list[Call[Any]] = []
        self.answer: Any = ()
        self.before: Any = lambda: None
        self.offset = 0  # of the server's clock, ms

    def run(self, call: Call[Any]) -> Any:
        self.sent.append(call)
        self.before()
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    return now


@pytest.fixture
def kept(clock: list[float]) -> tuple[LeaseKeeper, FakeQueue, list[Message]]:
    queue = FakeQueue()
    said: list[Message] = []
    transport = make_worker(Role.PREFILL)[0].backend.transport
    return LeaseKeeper(queue, "me", transport, said.append), queue, said  # type: ignore[arg-type]


Kept = tuple[LeaseKeeper, FakeQueue, list[Message]]


def test_each_answer_of_a_renewal_means_one_thing(kept: Kept) -> None:
    keeper, queue, said = kept
    for job in ("kept", "done", "lost"):
        keeper.hold(job, 1)
    for job in ("hold", "release"):
        keeper.hold(job, 1)
        keeper.export(job, 1)
    queue.answer = ("kept", "done", "lost", "hold", "release")
    keeper._renew()
    assert said == [Stop("done", 1, "done"), Stop("lost", 1, "lost"), Release("release", 1)]


def test_an_answer_about_what_has_moved_on_meanwhile_is_ignored(kept: Kept) -> None:
    keeper, queue, said = kept
    for job in ("dropped", "exported"):
        keeper.hold(job, 1)

    def meanwhile() -> None:
        keeper.drop("dropped", 1)
        keeper.export("exported", 1)

    queue.before, queue.answer = meanwhile, ("lost", "lost")
    keeper._renew()
    assert said == []


def test_nothing_held_asks_nothing(kept: Kept) -> None:
    keeper, queue, _ = kept
    keeper._renew()
    keeper.hold("a", 1)
    keeper.drop("a", 1)
    keeper._renew()
    assert queue.sent == []


def test_a_model_loop_that_hangs_is_renewed_no_more_and_again_when_it_moves(kept: Kept, clock: list[float]) -> None:
    keeper, queue, _ = kept
    keeper.hold("a", 1)
    queue.answer = ("kept",)
    clock[0] += TIMES.stall_ms / 1000 + 0.1
    keeper._renew()
    assert queue.sent == []
    keeper.stamp()
    keeper._renew()
    assert len(queue.sent) == 1


def test_a_sweep_waits_for_one_lease_of_contact_and_an_outage_begins_it_anew(kept: Kept, clock: list[float]) -> None:
    keeper, queue, _ = kept
    queue.answer = Reaped()

    assert not swept(kept, clock)
    pass_time(clock, kept, 0.9)
    assert not swept(kept, clock)
    pass_time(clock, kept, 0.2)
    assert swept(kept, clock)
    queue.answer = QueueUnavailable("away")
    keeper._attempt(keeper._sweep)
    queue.answer = Reaped()
    assert not swept(kept, clock)
    pass_time(clock, kept, 1.1)
    assert swept(kept, clock)


def test_a_gap_in_the_servers_time_begins_it_anew_though_no_call_failed(kept: Kept, clock: list[float]) -> None:
    pass_time(clock, kept, 1.2)
    assert swept(kept, clock)
    beat(kept, clock, stood_still_ms=TIMES.lease_ms)
    assert not swept(kept, clock)
    pass_time(clock, kept, 0.9)
    assert not swept(kept, clock)
    pass_time(clock, kept, 0.2)
    assert swept(kept, clock)


def test_a_sweep_says_until_when_it_counts(kept: Kept, clock: list[float]) -> None:
    keeper, queue, _ = kept
    pass_time(clock, kept, 1.2)
    clock[0] += 0.1
    queue.answer = Reaped()
    keeper._sweep()
    assert queue.sent[-1].args[5] == int(clock[0] * 1000) + TIMES.lease_ms // 4


def beat(kept: Kept, clock: list[float], stood_still_ms: int = 0) -> None:
    keeper, queue, _ = kept
    queue.offset += stood_still_ms
    queue.answer = int(clock[0] * 1000) + queue.offset
    keeper._attempt(keeper._beat)


def pass_time(clock: list[float], kept: Kept, seconds: float) -> None:
    """With a heartbeat now and then, as the thread does."""
    beat(kept, clock)
    for _ in range(4):
        clock[0] += seconds / 4
        beat(kept, clock)


def swept(kept: Kept, clock: list[float]) -> bool:
    keeper, queue, _ = kept
    queue.answer = Reaped()
    queue.sent.clear()
    keeper._attempt(keeper._sweep)
    return bool(queue.sent)


def test_a_worker_is_ready_while_redis_hears_of_it_and_its_model_loop_moves(kept: Kept, clock: list[float]) -> None:
    keeper, queue, _ = kept
    assert keeper.problems() == ["the worker is starting", "Redis has not heard of this worker yet"]
    keeper.publish({"state": "ready"})
    queue.answer = 1_000
    keeper._attempt(keeper._beat)
    assert keeper.problems() == []
    queue.answer = QueueUnavailable("gone")
    clock[0] += 5
    keeper.stamp()
    keeper._attempt(keeper._beat)
    assert keeper.problems() == ["Redis has not answered for 5000 ms"]
    queue.answer = 6_000
    keeper._attempt(keeper._beat)
    clock[0] += 4
    keeper._attempt(keeper._beat)
    clock[0] += 1
    assert keeper.problems() == ["the model loop has not moved for 5000 ms"]
    keeper.stamp()
    keeper.publish({"state": "draining"})
    assert keeper.problems() == ["the worker is draining"]


class Mapped(Transport):
    """Has the memory of peers mapped, some of them dead."""

    def __init__(self, *dead: str) -> None:
        self.dead, self.living = set(dead), {"alive"}
        self.forgotten: list[str] = []
        self.all_forgotten = threading.Event()

    def peers(self) -> frozenset[str]:
        return frozenset(self.dead | self.living)

    def orphans(self) -> frozenset[str]:
        return frozenset(self.dead)

    def forget(self, owner: str) -> None:
        self.dead.discard(owner)
        self.forgotten.append(owner)
        if not self.dead:
            self.all_forgotten.set()


def keeper_with(transport: Transport) -> tuple[LeaseKeeper, FakeQueue]:
    queue = FakeQueue()
    return LeaseKeeper(queue, "me", transport, lambda _: None), queue  # type: ignore[arg-type]


def test_the_memory_of_dead_peers_is_unmapped_once_and_that_of_the_living_stays() -> None:
    transport = Mapped("a", "b")
    keeper, queue = keeper_with(transport)
    keeper._forget_dead_peers()
    keeper._forget_dead_peers()
    assert sorted(transport.forgotten) == ["a", "b"]
    assert queue.sent == [], "locks say it, and Redis need not answer"


def test_memory_that_cannot_be_unmapped_does_not_keep_the_lease_thread_from_the_rest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    transport = Mapped("a", "b")
    forget = transport.forget

    def refused(owner: str) -> None:
        forget(owner)
        raise CudaError("cudaIpcCloseMemHandle", 700, "cudaErrorIllegalAddress")

    monkeypatch.setattr(transport, "forget", refused)
    keeper, _ = keeper_with(transport)
    keeper._forget_dead_peers()
    assert sorted(transport.forgotten) == ["a", "b"]


def test_the_lease_thread_looks_for_dead_peers_though_redis_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease, "DEAD_PEERS_MS", 10)
    transport = Mapped("a")
    keeper, queue = keeper_with(transport)
    queue.answer = QueueUnavailable("away")
    keeper.start()
    try:
        assert transport.all_forgotten.wait(30)
    finally:
        keeper.stop()
    assert transport.forgotten == ["a"]
