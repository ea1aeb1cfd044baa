"""Contracts of beat and tidy, the two scripts about workers,."""

from __future__ import annotations

import orjson
import pytest

from prelay_queue.job import Priority
from prelay_queue.state import State
from tests.integration.queue_desk import API, D1, DOMAIN, JOB, P1, P2, Desk, new_job

TTL_MS = 15_000


def test_a_heartbeat_says_what_the_worker_says_and_the_servers_time(desk: Desk) -> None:
    status = {"id": P1, "kv": {"total": 4, "free": 3}, "text": 'quoted "}{"'}
    now = desk.run(desk.scripts.beat(P1, status, TTL_MS))
    assert orjson.loads(desk.look().beats[P1]) == {**status, "t": now}
    assert abs(now - desk.now_ms()) < 5_000
    assert 0 < desk.left_ms(desk.keys.worker(P1)) <= TTL_MS
    assert desk.look().scores["workers"] == {P1: now}


def test_a_heartbeat_forgets_the_workers_that_are_long_gone(desk: Desk) -> None:
    for worker, ago_ms in {"gone": 4 * TTL_MS + 1, "late": TTL_MS}.items():
        desk.backend.set_score("workers", worker, desk.now_ms() - ago_ms)
    desk.run(desk.scripts.beat(P1, {"id": P1}, TTL_MS))
    assert set(desk.look().scores["workers"]) == {"late", P1}


def test_a_heartbeat_keeps_the_control_stream_and_does_not_make_one(desk: Desk) -> None:
    desk.run(desk.scripts.beat(P1, {"id": P1}, TTL_MS))
    assert not desk.has(desk.keys.control(P1))
    desk.mind(P1)
    desk.run(desk.scripts.beat(P1, {"id": P1}, TTL_MS))
    assert 50_000 < desk.left_ms(desk.keys.control(P1)) <= 60_000


def test_a_full_server_still_takes_heartbeats(desk: Desk) -> None:
    with desk.backend.full():
        desk.run(desk.scripts.beat(P1, {"id": P1}, TTL_MS))
    assert desk.has(desk.keys.worker(P1))


def test_the_consumers_of_dead_workers_are_removed_and_those_of_live_ones_stay(desk: Desk) -> None:
    desk.to(State.DECODE)
    desk.run(desk.scripts.beat(P1, {"id": P1}, TTL_MS))
    prefill, decode = desk.keys.work("prefill")[3], desk.keys.work(f"decode:{DOMAIN}")[3]
    assert (desk.consumers(prefill), desk.consumers(decode)) == ({P1}, {D1})
    assert desk.run(desk.scripts.tidy()) > 0
    assert (desk.consumers(prefill), desk.consumers(decode)) == ({P1}, set())
    assert desk.run(desk.scripts.tidy()) == 0


def test_a_dead_consumer_with_a_pending_entry_is_left_until_the_entry_is_taken_over(desk: Desk) -> None:
    desk.submit()
    stream, entry, job = desk.deliver(P1)
    desk.run(desk.scripts.tidy())
    assert desk.consumers(stream) == {P1}
    assert desk.pending(stream) == {entry: P1}
    desk.backend.take_over(stream, P2)
    assert desk.run(desk.scripts.claim(stream, entry, job, P2, 60_000)).code == "ok"
    desk.run(desk.scripts.tidy())
    assert desk.consumers(stream) == set()


@pytest.mark.parametrize("priority", Priority)
def test_consumers_of_every_class_are_looked_at(desk: Desk, priority: Priority) -> None:
    desk.to(State.DECODE, new_job(priority=priority))
    desk.run(desk.scripts.tidy())
    for stage in ("prefill", f"decode:{DOMAIN}"):
        for stream in desk.keys.work(stage):
            assert desk.consumers(stream) == set()


def test_tidying_survives_streams_that_do_not_exist(desk: Desk) -> None:
    desk.to(State.STAGED)  # its domain is known
    desk.checked = False
    for stage in ("prefill", f"decode:{DOMAIN}"):
        desk.backend.delete(*desk.keys.work(stage))
    assert desk.run(desk.scripts.tidy()) == 0


def test_the_leases_of_a_worker_known_to_be_dead_end_at_once(desk: Desk) -> None:
    desk.submit(new_job("mine/0"))
    desk.claim(P1)
    desk.submit(new_job("other/0"))
    desk.claim(P2)
    for worker in (P1, P2):
        desk.run(desk.scripts.beat(worker, {"id": worker}, TTL_MS))

    assert desk.run(desk.scripts.disown(P1.rpartition(":")[0] + ":")) == 1

    assert not desk.has(desk.keys.worker(P1))
    assert desk.has(desk.keys.worker(P2))
    swept = desk.reap()
    assert swept.reaped == ("mine/0",)


def test_a_beginning_that_is_empty_disowns_nobody(desk: Desk) -> None:
    desk.submit()
    desk.claim(P1)
    assert desk.run(desk.scripts.disown("")) == 0


# disown


def test_the_jobs_of_a_worker_that_is_known_to_be_dead_are_swept_at_once(desk: Desk) -> None:
    dead, alive = "host:12:abcd", "host:123:abcd"  # one pid begins like the other
    names = {dead: "a/0", alive: "b/0"}
    for worker, job in names.items():
        desk.submit(new_job(job))
        assert desk.claim(worker).code == "ok"
        desk.mind(worker)
        desk.run(desk.scripts.beat(worker, {"id": worker}, TTL_MS))
    assert desk.run(desk.scripts.disown("host:12:")) == 1
    of_dead, of_alive = ({desk.keys.worker(name), desk.keys.control(name)} for name in (dead, alive))
    assert not any(desk.has(key) for key in of_dead)
    assert all(desk.has(key) for key in of_alive)
    assert set(desk.look().scores["workers"]) == {alive}
    assert desk.reap(check_ms=10**9).reaped == ("a/0",)
    assert desk.emit(0, (1,), owner=dead, job="a/0").code == "fenced"
    assert desk.run(desk.scripts.disown("host:12:")) == 0


def test_the_export_of_a_dead_worker_is_given_up_but_not_the_job_that_left_it(desk: Desk) -> None:
    desk.to(State.ADOPTING, new_job("left/0"))
    desk.to(State.STAGED, new_job("waits/0"))
    assert desk.run(desk.scripts.disown(P1)) == 1
    assert desk.reap(check_ms=10**9).reaped == ("waits/0",)
    assert desk.fields("left/0")["st"] == "adopting"


def test_nobody_is_disowned_by_an_empty_prefix(desk: Desk) -> None:
    desk.to(State.DECODE)
    before = desk.look()
    assert desk.run(desk.scripts.disown("")) == 0
    assert desk.look() == before


# attend


def test_an_api_process_that_attends_has_a_live_stream_that_lives_as_long(desk: Desk) -> None:
    with desk.backend.full():
        entry, server_ms = desk.run(desk.scripts.attend(API, 30, begin=True))
        assert desk.run(desk.scripts.attend(API, 30, begin=False))[0] == ""
    assert desk.entries(desk.keys.live(API)) == [(entry, {"e": "[]"})]
    assert 25_000 < desk.left_ms(desk.keys.live(API)) <= 30_000
    assert abs(desk.now_ms() - server_ms) < 5_000


def test_attending_alone_makes_no_stream(desk: Desk) -> None:
    assert desk.run(desk.scripts.attend(API, 30, begin=False))[0] == ""
    assert not desk.has(desk.keys.live(API))


def test_a_wish_to_evict_follows_a_job_that_is_handed_over_meanwhile(desk: Desk) -> None:
    desk.mind(P1, D1)
    desk.to(State.STAGED)
    assert desk.run(desk.scripts.evict(JOB)) == ("staged", P1, 1)
    assert ("preempt", JOB, 1) in desk.told(P1)

    desk.claim(D1, f"decode:{DOMAIN}")

    assert desk.told(D1) == [("preempt", JOB, 1)]


def test_a_wish_to_evict_is_over_with_its_epoch(desk: Desk) -> None:
    desk.mind(P1, D1)
    desk.to(State.DECODE)
    desk.run(desk.scripts.evict(JOB))
    desk.preempt()
    desk.requeue(-1)
    assert desk.run(desk.scripts.evict(JOB)) == ("queued", "", 2)
    desk.claim(P1)
    assert ("preempt", JOB, 2) not in desk.told(P1)


def test_a_job_that_is_not_known_cannot_be_evicted(desk: Desk) -> None:
    assert desk.run(desk.scripts.evict("never/0")) == ("gone", "", 0)
