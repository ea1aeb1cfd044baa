"""Public faults of many connections at once, as tests: all served over few, mixed up, given up, and slow."""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import threading
from collections.abc import Iterator

import httpx
import psutil
import pytest

from prelay_worker.config import NullModel, Role
from tests.bed.chain import check_chain
from tests.bed.http import client_of, request
from tests.bed.lines import lines, named, watched
from tests.bed.mute import ask
from tests.bed.parts import RESUMABLE, post_part
from tests.bed.processes import until
from tests.bed.servers import Server
from tests.bed.tokenizer import chat, ids_of
from tests.faults.crowd import Site, body, site
from tests.faults.forked import ApiProcess
from tests.faults.jobs import ends, running
from tests.faults.traffic import CHAT, COMPLETIONS

PLAIN = NullModel(step_ms=5)
#: Connections of one API process to Redis are fewer.
MOST_LINES = 10


def until_all_over(here: Site, timeout_s: float = 30) -> None:
    until(lambda: not running(here), timeout_s)


# --- all at once


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_six_hundred_streams_of_one_process_are_all_served_over_few_connections(shared_server: Server) -> None:
    """hopeit#222: each stream took a connection of its own, until there were none.

    They come at once, and are open all together while nobody serves them; none is refused on the way.
    """
    with site(shared_server, null=NullModel(step_ms=100)) as here:
        api = here.start_api(queue=named(here.settings, "api"))
        until(lambda: api.id, 20)
        before = psutil.Process(api.pid).num_fds()
        with watched(shared_server, "api") as most:
            crowd = here.crowd(api, 600, max_tokens=15)
            until(lambda: all(found.status for found in crowd.streams), 60)
            assert {found.status for found in crowd.streams} == {200}
            assert psutil.Process(api.pid).num_fds() >= before + 600
            here.serve(Role.PREFILL, Role.DECODE, blocks=16384, max_running=1024)
            here.check_crowds(120)
        assert most.seen < MOST_LINES
        until(lambda: psutil.Process(api.pid).num_fds() <= before + MOST_LINES)
        here.check_nothing_left()


# --- mixed up


async def _visit(client: httpx.AsyncClient, n: int, chance: random.Random) -> int:
    """Ask, in one of two ways, and leave at a random moment: often before the answer begins. Return tokens heard."""
    prompt = [n % 1000, n // 1000, *range(4)]
    within_s = chance.choice([chance.uniform(0, 0.05), chance.uniform(0, 0.5), 60])
    heard: list[int] = []
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(within_s):
            if n % 4 == 0:
                reply = await client.post(COMPLETIONS, json=body(prompt, 12))
                assert reply.status_code == 200, reply.text
                heard = ids_of(reply.json()["choices"][0]["text"])
            else:
                found = await post_part(client, COMPLETIONS, body(prompt, 24), most=chance.randrange(1, 20))
                assert found.status == 200, found.error
                heard = found.choices[0].ids
    check_chain(prompt, heard)
    return len(heard)


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_two_thousand_clients_that_leave_at_random_never_hear_of_each_other(shared_server: Server) -> None:
    """redis-py#2624: a connection that was given back with an answer in it gave one request's tokens to another."""
    chance = random.Random(2624)

    async def crowd(url: str) -> int:
        gate = asyncio.Semaphore(60)

        async def come(client: httpx.AsyncClient, n: int) -> int:
            async with gate:
                return await _visit(client, n, chance)

        async with client_of(url) as client:
            return sum(await asyncio.gather(*(come(client, n) for n in range(2000))))

    with site(shared_server, null=PLAIN) as here:
        here.serve(Role.PREFILL, Role.DECODE, blocks=8192, max_running=256)
        api = here.api(queue=named(here.settings, "api"))
        with watched(shared_server, "api") as most:
            heard = asyncio.run(crowd(api.url))
            until_all_over(here)
        assert heard > 2000, "nearly all left before they heard anything"
        assert set(ends(here)) <= {"cancelled", "length"}
        assert most.seen < MOST_LINES
        # Of eight connections each that were lost to a client who had gone would be one less for these.
        here.crowd(api, 40, max_tokens=20, first=500).check()
        assert lines(shared_server, "api") < MOST_LINES
        here.check_nothing_left()


# --- given up


@pytest.mark.slow
def test_five_hundred_clients_that_give_up_without_workers_leave_no_backlog(shared_server: Server) -> None:
    """litellm#20059: the queue went on to hold what nobody waited for."""

    async def give_up(client: httpx.AsyncClient, n: int) -> None:
        with pytest.raises(httpx.ReadTimeout):
            await client.post(COMPLETIONS, json=body([n, *range(4)], 20), timeout=httpx.Timeout(60, read=1.0))

    async def crowd(url: str) -> None:
        async with client_of(url) as client:
            await asyncio.gather(*(give_up(client, n) for n in range(500)))

    with site(shared_server, null=PLAIN) as here:
        api = here.start_api()
        until(lambda: api.id, 20)
        asyncio.run(crowd(api.url))
        until_all_over(here, 20)
        assert set(ends(here)) == {"cancelled"}
        here.serve(Role.PREFILL, Role.DECODE)
        here.crowd(api, 4, max_tokens=20).check()
        (decode,) = (beat for beat in here.status() if beat["role"] == Role.DECODE)
        assert decode["computed_tokens"] <= 4 * 20, "somebody was answered who had gone"
        here.check_nothing_left()


# --- slow

#: What a slow client takes of its answer, bytes per second.
SLOW_BPS = 10
#: More than a kilobyte is said of each token.
WORDY = {"model": "null", "stream": True, "logprobs": True, "top_logprobs": 20}


@pytest.mark.slow
def test_clients_that_read_next_to_nothing_cost_neither_memory_nor_speed(shared_server: Server) -> None:
    """opencti#13908: what slow readers had not taken was kept for them without bound.

    Two hundred read ten bytes a second of answers that would take minutes. They are cut off after the stall limit, and
    their jobs end. Decode goes on meanwhile, step by step, and somebody who reads has each token as it comes.
    """
    with site(shared_server, null=NullModel(step_ms=30)) as here:
        here.serve(Role.PREFILL, Role.DECODE, blocks=65536, max_running=512)
        api = here.api(stall_s=6.0, linger_s=300)
        pace = asyncio.run(_leave_running(api))
        before = psutil.Process(api.pid).memory_info().rss
        with slow_readers(api, 200, tokens=3000):
            until(lambda: running(here)["decode"] > 50, 30)
            steps = _steps_beside(here, api, pace)
            until(lambda: not running(here).total() > 1, 90)
            grown = psutil.Process(api.pid).memory_info().rss - before
        assert request("DELETE", f"{api.url}/v1/streams/{pace}").status_code == 200
        print(f"{steps} steps for 60 tokens; {grown / 2**20:.1f} MiB")
        assert 45 <= steps <= 300  # the pace is read when the client has ended, which a busy machine lets wait
        assert ends(here) == {"length": 1, "cancelled": 201}
        assert api.log.count("its stream is cut") == 200
        assert grown < 80 * 2**20
        here.check_nothing_left()


async def _leave_running(api: ApiProcess) -> str:
    """A request whose client has gone and will come back: it has a token of every step of decode."""
    async with client_of(api.url) as client:
        found = await post_part(client, COMPLETIONS, body([999, 1], 4000), most=2, headers=RESUMABLE)
    return found.headers["x-request-id"]


def _steps_beside(here: Site, api: ApiProcess, pace: str) -> int:
    """How many steps decode made between the first and the last of the 60 tokens that a client heard."""

    def steps() -> int:
        return int(here.redis.hget(here.keys.job(f"{pace}/0"), "nx") or 0)

    crowd = here.crowd(api, 1, max_tokens=60, first=900)
    until(lambda: crowd.streams[0].frames, 60)
    before = steps()
    crowd.check()
    return steps() - before


@contextlib.contextmanager
def slow_readers(api: ApiProcess, count: int, tokens: int) -> Iterator[None]:
    """Clients with small buffers that take a few bytes of their answers each second."""
    sockets = [_ask_slowly(api, n, tokens) for n in range(count)]
    stopping = threading.Event()

    def sip() -> None:
        while not stopping.wait(1):
            for each in sockets:
                with contextlib.suppress(OSError):  # nothing there, or cut off
                    each.recv(SLOW_BPS)

    thread = threading.Thread(target=sip)
    thread.start()
    try:
        yield
    finally:
        stopping.set()
        thread.join()
        for each in sockets:
            each.close()


def _ask_slowly(api: ApiProcess, n: int, tokens: int) -> socket.socket:
    asked = {**WORDY, "messages": chat([n, 3]), "max_tokens": tokens}
    connection = ask(api.url, CHAT, asked, buffer_bytes=2048)
    connection.setblocking(False)
    return connection
