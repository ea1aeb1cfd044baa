"""Faults of Redis, and of the way to it: killed, flushed, full, read-only, cut, emptied streams."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from prelay_queue.errors import QueueFull
from prelay_queue.keys import GROUP
from prelay_worker.config import Role
from tests.bed.processes import again_and_again, until
from tests.bed.servers import Server
from tests.faults.fleet import NULL, TIMES, NullFleet, null_fleet
from tests.faults.proxy import CuttingProxy

SLOW = replace(NULL, step_ms=8, divergent=True)


@contextmanager
def working(server: Server, jobs: int = 12, max_tokens: int = 60, blocks: int = 100) -> Iterator[NullFleet]:
    """A fleet in the middle of its work."""
    with null_fleet(server, null=SLOW) as fleet:
        fleet.start(Role.PREFILL, blocks=256)
        fleet.start(Role.DECODE, blocks=blocks)
        fleet.until_ready()
        fleet.submit(jobs, max_tokens=max_tokens)
        until(lambda: sum(len(fleet.view(client).ids) for client in fleet.clients) > 20)
        yield fleet


@pytest.mark.parametrize(
    "away_s", [pytest.param(0.1, marks=pytest.mark.slow), 1, pytest.param(5, marks=pytest.mark.slow)]
)
def test_a_redis_that_is_killed_and_comes_back_costs_no_token_and_no_process(own_server: Server, away_s: float) -> None:
    with working(own_server) as fleet:
        own_server.kill()
        time.sleep(away_s)  # the fault itself
        own_server.start()
        fleet.until_done()
        assert fleet.ended == []
        fleet.finish()


def test_a_script_cache_that_is_flushed_all_the_time_is_not_noticed(own_server: Server) -> None:
    with working(own_server) as fleet, again_and_again(0.02, own_server.client.script_flush):
        fleet.submit(8)
        fleet.until_done()
        assert "WARNING prelay.writer" not in fleet.logs()
        assert "WARNING prelay.claim" not in fleet.logs()
        assert "ERROR" not in fleet.logs()
        fleet.finish()


@pytest.mark.parametrize(
    "damage",
    ["trim", pytest.param("delete", marks=pytest.mark.slow), pytest.param("destroy groups", marks=pytest.mark.slow)],
)
def test_work_streams_that_are_emptied_under_load_heal_and_say_little(shared_server: Server, damage: str) -> None:
    with working(shared_server, jobs=24) as fleet:
        streams = [*fleet.keys.work("prefill"), *fleet.keys.work("decode:null")]
        for _ in range(3):
            fleet.submit(8)
            for stream in streams:
                if damage == "trim":
                    fleet.redis.xtrim(stream, maxlen=0)
                elif damage == "delete":
                    fleet.redis.delete(stream)
                else:
                    fleet.redis.xgroup_destroy(stream, GROUP)
            time.sleep(0.2)  # between the faults
        fleet.until_done()
        fleet.check_answers()
        for worker in fleet.workers:
            said = worker.log.splitlines()
            assert sum(line.startswith(("WARNING prelay.claim", "ERROR")) for line in said) < 10, worker.log
        fleet.finish()


def test_a_full_redis_ends_what_runs_refuses_what_is_new_and_recovers_alone(own_server: Server) -> None:
    with working(own_server) as fleet:
        own_server.client.config_set("maxmemory", 1)
        with pytest.raises(QueueFull):
            fleet.submit(1)
        fleet.until_done()
        fleet.until_free()  # heartbeats go on
        assert fleet.ended == []
        own_server.client.config_set("maxmemory", 0)
        fleet.submit(2)
        fleet.finish()


@pytest.mark.slow
def test_a_worker_lost_while_redis_is_full_is_replaced_and_its_jobs_go_on(own_server: Server) -> None:
    with working(own_server) as fleet:
        own_server.client.config_set("maxmemory", 1)
        fleet.workers[1].kill()
        fleet.until_done()
        own_server.client.config_set("maxmemory", 0)
        assert len(fleet.ended) == 1
        fleet.finish()


def test_a_master_that_becomes_a_replica_for_a_while_costs_no_token(own_server: Server) -> None:
    """queue case 13, redis-py#460: clients stayed with a master that had become read-only.

    What an API process says then is in tests/integration/test_api_recovery.py.
    """
    with working(own_server) as fleet:
        own_server.client.execute_command("REPLICAOF", "127.0.0.1", "1")
        time.sleep(1)  # the fault itself
        own_server.client.execute_command("REPLICAOF", "NO", "ONE")
        fleet.until_done()
        assert fleet.ended == []
        fleet.submit(4)  # the claim threads live
        fleet.finish()


@pytest.mark.parametrize("cut", [0.01, pytest.param(0.05, marks=pytest.mark.slow)])
def test_replies_cut_after_the_request_double_nothing(shared_server: Server, tmp_path: Path, cut: float) -> None:
    proxy = CuttingProxy(shared_server.socket, Path(f"/tmp/cut-{time.monotonic_ns()}.sock"), cut)
    try:
        with null_fleet(shared_server, null=SLOW, url=proxy.url) as fleet:
            fleet.start(Role.PREFILL)
            fleet.start(Role.DECODE)
            fleet.submit(24, max_tokens=40)
            fleet.until_done(60)
            fleet.check_answers()
            assert proxy.cuts > 3
            proxy.cut = 0
            fleet.finish()
    finally:
        proxy.close()


def test_a_redis_that_stands_still_for_more_than_a_lease_expires_nobody(own_server: Server) -> None:
    with working(own_server, blocks=600) as fleet:
        fleet.until_done()
        time.sleep(TIMES.lease_ms / 1000)  # so that the sweeps have begun
        clients = fleet.submit(8, max_tokens=200)
        until(lambda: sum(len(fleet.view(client).ids) for client in clients) > 200)
        own_server.kill(signal.SIGSTOP)
        time.sleep(TIMES.lease_ms / 1000 + 0.3)  # the fault itself: shorter than the time-outs, longer than a lease
        own_server.kill(signal.SIGCONT)
        fleet.until_done()
        assert "reaped" not in fleet.logs()
        fleet.finish()


@pytest.mark.slow
def test_a_redis_that_stands_still_for_longer_than_every_time_out_costs_no_token(own_server: Server) -> None:
    with working(own_server) as fleet:
        own_server.kill(signal.SIGSTOP)
        time.sleep(6)  # the fault itself
        own_server.kill(signal.SIGCONT)
        fleet.until_done()
        assert fleet.ended == []
        fleet.finish()
