"""Public faults of connections, as tests: many, silent, slow, cut and resumed ones, and servers that stop."""

from __future__ import annotations

import asyncio
import random
import signal
import socket
import time
from dataclasses import replace
from itertools import cycle

import httpx
import psutil
import pytest

from prelay_worker.config import NullModel, Role
from tests.bed.bound import bound
from tests.bed.chain import Stream, check_chain, check_stream, stream
from tests.bed.http import client_of, post
from tests.bed.parts import RESUMABLE, Part, get_part, joined, post_part
from tests.bed.processes import until
from tests.bed.servers import Server
from tests.faults.crowd import DIVERGENT, Site, body, site
from tests.faults.forked import ApiProcess
from tests.faults.jobs import ends, running
from tests.faults.traffic import COMPLETIONS

PLAIN = NullModel(step_ms=5)
#: Redis connections of one API process, at most.
MOST_CONNECTIONS = 10


def connections_of(process: ApiProcess) -> int:
    """Connections that a process has to the server, which listens on a Unix socket; clients come by TCP."""
    return len(psutil.Process(process.pid).net_connections("unix"))


def until_all_over(here: Site, timeout_s: float = 30) -> None:
    until(lambda: not running(here), timeout_s)


# --- many


@pytest.mark.slow
def test_six_hundred_streams_of_one_process_are_all_served_over_few_connections(shared_server: Server) -> None:
    """hopeit#222: each stream took a connection of its own, until there were none."""
    with site(shared_server, null=PLAIN) as here:
        here.serve(Role.PREFILL, Role.DECODE, blocks=16384, max_running=1024)
        api = here.api()
        before = psutil.Process(api.pid).num_fds()
        crowd = here.crowd(api, 600, max_tokens=30)
        until(lambda: len(crowd.open) >= 300, 60)
        assert connections_of(api) < MOST_CONNECTIONS
        here.check_crowds(120)
        assert psutil.Process(api.pid).num_fds() <= before + MOST_CONNECTIONS
        here.check_nothing_left()


@pytest.mark.slow
def test_two_thousand_clients_that_leave_at_random_never_hear_of_each_other(shared_server: Server) -> None:
    """redis-py#2624: a connection that was given back with an answer in it gave one request's tokens to another."""
    chance = random.Random(2624)

    async def visit(client: httpx.AsyncClient, n: int, gate: asyncio.Semaphore) -> None:
        async with gate:
            prompt = [n % 1000, n // 1000, *range(4)]
            found = await post_part(client, COMPLETIONS, body(prompt, 40), most=chance.randrange(1, 20))
            for heard in found.choices.values():
                check_chain(prompt, heard.ids)

    async def crowd(url: str) -> None:
        gate = asyncio.Semaphore(100)
        async with client_of(url) as client:
            await asyncio.gather(*(visit(client, n, gate) for n in range(2000)))

    with site(shared_server, null=PLAIN) as here:
        here.serve(Role.PREFILL, Role.DECODE, blocks=8192, max_running=256)
        api = here.api()
        base = connections_of(api)
        asyncio.run(crowd(api.url))
        until_all_over(here)
        assert connections_of(api) <= max(base, MOST_CONNECTIONS - 1)
        probe = here.crowd(api, 1, max_tokens=20, first=999)
        probe.check()
        here.check_nothing_left()


@pytest.mark.slow
def test_five_hundred_clients_that_give_up_without_workers_leave_no_backlog(shared_server: Server) -> None:
    """litellm#20059: the queue went on to hold what nobody waited for."""

    async def ask(client: httpx.AsyncClient, n: int) -> None:
        try:
            await client.post(COMPLETIONS, json=body([n, *range(4)], 20), timeout=httpx.Timeout(30, read=1.0))
        except httpx.TimeoutException:
            return
        raise AssertionError("somebody answered")

    async def crowd(url: str) -> None:
        async with client_of(url) as client:
            await asyncio.gather(*(ask(client, n) for n in range(500)))

    with site(shared_server, null=PLAIN) as here:
        api = here.start_api()
        until(lambda: api.id, 20)
        asyncio.run(crowd(api.url))
        until_all_over(here, 20)
        assert set(ends(here)) == {"cancelled"}
        here.serve(Role.PREFILL, Role.DECODE)
        probe = here.crowd(api, 4, max_tokens=20)
        probe.check()
        here.check_nothing_left()


# --- silence


@pytest.mark.slow
def test_after_two_minutes_without_traffic_the_next_request_is_served_as_ever(shared_server: Server) -> None:
    """docket#425: blocking reads that had idled too long reconnected in a storm."""
    with site(shared_server, null=PLAIN) as here:
        here.serve(Role.PREFILL, Role.DECODE)
        api = here.api()
        here.crowd(api, 4, max_tokens=20).check()
        connected = here.redis.info("stats")["total_connections_received"]
        time.sleep(120)
        since = here.redis.info("stats")["total_connections_received"] - connected
        assert since < 10, f"{since} new connections while nothing happened"
        begun = time.monotonic()
        here.crowd(api, 4, max_tokens=20, first=500).check()
        assert time.monotonic() - begun < 2.0, "the first tokens after a pause came late"
        here.check_nothing_left()


def test_a_stream_that_waits_long_is_never_silent_for_five_seconds(shared_server: Server) -> None:
    """vllm#47647: behind a proxy with a read timeout of 5 s, a request that is still queued lives on."""
    with site(shared_server, null=PLAIN) as here:
        api = here.start_api(keep_alive_s=4.0)
        until(lambda: api.id, 20)

        async def behind_a_proxy() -> Stream:
            timeout = httpx.Timeout(30, read=5.0)
            async with httpx.AsyncClient(base_url=api.url, timeout=timeout) as client:
                return await stream(client, COMPLETIONS, body([1, 2], 20))

        async def wait_and_serve() -> Stream:
            asking = asyncio.create_task(behind_a_proxy())
            await asyncio.sleep(13)
            await asyncio.to_thread(here.serve, Role.PREFILL, Role.DECODE)
            return await asking

        found = asyncio.run(wait_and_serve())
        check_stream(found, [1, 2], 20)
        assert found.said.count("queued 1") >= 3
        here.check_nothing_left()


# --- slow readers


@pytest.mark.slow
def test_clients_that_read_next_to_nothing_cost_neither_memory_nor_speed(shared_server: Server) -> None:
    """opencti#13908: what slow readers had not taken was kept for them without bound."""
    with site(shared_server, null=replace(PLAIN, step_ms=2)) as here:
        here.serve(Role.PREFILL, Role.DECODE, blocks=65536, max_running=512)
        api = here.api(stall_s=15.0)
        here.crowd(api, 4, max_tokens=500).check()
        alone_s = _time_of(here, api)
        before = psutil.Process(api.pid).memory_info().rss
        sockets = [_ask_and_read_nothing(api, n) for n in range(200)]
        try:
            until(lambda: running(here).total() >= 200, 30)
            beside_s = _time_of(here, api)
            grown = psutil.Process(api.pid).memory_info().rss - before
            assert grown < 200 * 2**20, f"{grown >> 20} MiB for 200 slow readers"
            assert beside_s < 10 * alone_s + 5
            until_all_over(here, 90)
        finally:
            for each in sockets:
                each.close()
        here.check_nothing_left()


def _time_of(here: Site, api: ApiProcess) -> float:
    begun = time.monotonic()
    post(api.url + COMPLETIONS, json=body([900, 1], 200), timeout=60)
    return time.monotonic() - begun


def _ask_and_read_nothing(api: ApiProcess, n: int) -> socket.socket:
    host, port = api.url.removeprefix("http://").split(":")
    asked = httpx.Request("POST", api.url + COMPLETIONS, json={**body([n, 3], 1500), "stream": True, "logprobs": 1})
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
    connection.connect((host, int(port)))
    head = "".join(f"{name}: {value}\r\n" for name, value in asked.headers.items())
    connection.sendall(f"POST {COMPLETIONS} HTTP/1.1\r\n{head}\r\n".encode() + asked.content)
    return connection


# --- cut streams, and servers that stop


@pytest.mark.slow
def test_a_stream_that_is_cut_anywhere_goes_on_elsewhere_as_if_nothing_was(shared_server: Server) -> None:
    """typescript-sdk#2499: resumed a second time, or by another process, it began again or skipped.

    With tokens that depend on the attempt, preempts in between, and two cuts on the way.
    """
    chance = random.Random(2499)

    async def one(urls: list[str], n: int) -> None:
        prompt = [n, *range(5)]
        async with client_of(urls[0]) as first, client_of(urls[1]) as second:
            clients = cycle([first, second] if n % 2 else [second, first])
            parts = [await post_part(next(clients), COMPLETIONS, body(prompt, 90), chance.randrange(2, 25), RESUMABLE)]
            parts.append(await get_part(next(clients), parts[0].id, parts[0].last_id, chance.randrange(1, 25)))
            last_id = parts[-1].last_id if parts[-1].frames else parts[0].last_id
            parts.append(await get_part(next(clients), parts[0].id, last_id))
        check_stream(joined(parts), prompt, 90, divergent=True)

    async def crowd(urls: list[str]) -> None:
        await asyncio.gather(*(one(urls, n) for n in range(24)))

    with site(shared_server, null=replace(DIVERGENT, step_ms=15)) as here:
        here.serve(Role.PREFILL, Role.DECODE, blocks=150)
        apis = [here.api(), here.api()]
        asyncio.run(crowd([api.url for api in apis]))
        until_all_over(here)
        here.check_nothing_left()


@pytest.mark.parametrize("moment", ["before", "after"])
def test_a_client_whose_api_process_dies_at_a_preempt_goes_on_with_another(shared_server: Server, moment: str) -> None:
    """Case 21, the client's half: what it has and what comes elsewhere are one answer."""
    with site(shared_server, null=replace(DIVERGENT, step_ms=15)) as here:
        here.serve(Role.PREFILL, Role.DECODE)
        dying, other = here.api(f"relay.requeue.{moment}=die"), here.api()

        async def ask() -> Stream:
            begun = Part()
            async with client_of(dying.url) as first, client_of(other.url) as second:
                asking = asyncio.create_task(post_part(first, COMPLETIONS, body([7, 7], 150), found=begun))
                await asyncio.to_thread(until, lambda: len(begun.frames) > 10)
                await asyncio.to_thread(here.evict)
                await asking
                assert not begun.done
                rest = await get_part(second, begun.id, begun.last_id)
            return joined([begun, rest])

        check_stream(asyncio.run(ask()), [7, 7], 150, divergent=True)
        assert dying.wait(10)
        here.apis.remove(dying)
        here.ended.append(dying)
        until_all_over(here)
        here.check_nothing_left()


def test_a_sigterm_with_fifty_open_streams_ends_within_its_grace_and_the_work_goes_on(shared_server: Server) -> None:
    """uvicorn#2913: it waited for its streams for ever, and cut them without a word."""
    with site(shared_server, null=PLAIN) as here:
        here.serve(Role.PREFILL, Role.DECODE, blocks=8192)
        stopping, other = here.api(drain_s=0.5, shutdown_grace_s=5), here.api()

        async def one(first: httpx.AsyncClient, second: httpx.AsyncClient, n: int) -> None:
            found = await post_part(first, COMPLETIONS, body([n, 1], 600), headers=RESUMABLE)
            assert not found.done
            rest = await get_part(second, found.headers["x-request-id"], found.last_id if found.frames else None)
            check_stream(joined([found, rest]), [n, 1], 600)

        async def crowd() -> float:
            async with client_of(stopping.url) as first, client_of(other.url) as second:
                asked = [asyncio.create_task(one(first, second, n)) for n in range(50)]
                await asyncio.to_thread(until, bound(lambda count: running(here).total() >= count, 50), 30)
                begun = time.monotonic()
                stopping.send(signal.SIGTERM)
                assert await asyncio.to_thread(stopping.wait, 10)
                assert stopping.code == 0
                took_s = time.monotonic() - begun
                await asyncio.gather(*asked)
            return took_s

        assert asyncio.run(crowd()) < 6.5
        here.apis.remove(stopping)
        here.ended.append(stopping)
        until_all_over(here)
        here.check_nothing_left()
