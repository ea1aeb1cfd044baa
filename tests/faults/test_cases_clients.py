"""Public faults of connections, as tests: silent and resumed ones, and servers that stop.

Those of many connections: test_cases_crowds.py.
"""

from __future__ import annotations

import asyncio
import random
import signal
import time
from dataclasses import replace
from itertools import cycle

import httpx
import pytest

from prelay_queue.settings import QueueTimes
from prelay_worker.config import NullModel, Role
from tests.bed.bound import bound
from tests.bed.chain import Stream, check_stream, stream
from tests.bed.http import client_of, request
from tests.bed.lines import lines, named
from tests.bed.mute import ask
from tests.bed.parts import RESUMABLE, Part, get_part, joined, post_part
from tests.bed.processes import until
from tests.bed.servers import Server
from tests.faults.crowd import DIVERGENT, Site, body, restarted, site
from tests.faults.forked import ApiProcess
from tests.faults.jobs import ends, jobs, running
from tests.faults.traffic import COMPLETIONS

PLAIN = NullModel(step_ms=5)
#: Connections of one API process to Redis are fewer.
MOST_LINES = 10
#: Longer than any time of the product.
SILENT_S = 40.0


def until_all_over(here: Site, timeout_s: float = 30) -> None:
    until(lambda: not running(here), timeout_s)


# --- silence


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


@pytest.mark.slow
def test_after_a_long_silence_the_next_request_is_served_as_ever(own_server: Server) -> None:
    """docket#425: blocking reads that had idled too long reconnected in a storm.

    With the product's own times, the longest of which is 30 s, and with a server that closes what has been idle for
    10 s, as hosted ones do.
    """
    own_server.client.config_set("timeout", 10)
    with site(own_server, null=PLAIN, times=QueueTimes()) as here:
        here.serve(Role.PREFILL, Role.DECODE)
        api = here.api(queue=named(here.settings, "api"))
        before_s = _time_to_first(here, api, 0)
        connected = _connected(own_server)
        time.sleep(SILENT_S)
        assert _connected(own_server) - connected < 10, "new connections while nothing happened"
        assert lines(own_server, "api") < MOST_LINES
        after_s = _time_to_first(here, api, 500)
        print(f"time to the first token: {before_s:.3f} s, and after the silence {after_s:.3f} s")
        assert after_s < before_s + 1.0
        assert _connected(own_server) - connected < 20, "a storm of new connections after the silence"
        here.check_nothing_left()


def _connected(server: Server) -> int:
    """Connections that the server has ever taken."""
    return int(server.client.info("stats")["total_connections_received"])


def _time_to_first(here: Site, api: ApiProcess, first: int) -> float:
    """Four clients at once: the longest time to a first token, in seconds."""
    begun = time.monotonic()
    streams = here.crowd(api, 4, max_tokens=20, first=first).check()
    return max(found.frames[0].at for found in streams) - begun


# --- clients that go


@pytest.mark.parametrize("way", ["a stream", "in one piece", "deleted"])
def test_the_workers_of_a_client_that_goes_stop_and_are_free_within_two_seconds(
    shared_server: Server, way: str
) -> None:
    """kv-preempt case 15, vllm#14326: of a request with n=4 whose client had left, choices ran on.

    Heartbeats, which tell what runs, come every 0.2 s here.
    """
    with site(shared_server, null=PLAIN) as here:
        here.serve(Role.PREFILL, Role.DECODE, blocks=4096)
        api = here.api()
        with ask(api.url, COMPLETIONS, {**body([1, 2], 3000), "n": 4, "stream": way != "in one piece"}):
            until(lambda: running(here)["decode"] == 4)
            if way == "deleted":
                (asked,) = {job.partition("/")[0] for job in jobs(here)}
                request("DELETE", f"{api.url}/v1/streams/{asked}")
                here.until_free(2)
        here.until_free(2)
        assert ends(here) == {"cancelled": 4}
        here.check_nothing_left()


# --- cut streams, and servers that stop


@pytest.mark.slow
def test_a_stream_that_is_cut_anywhere_goes_on_elsewhere_as_if_nothing_was(shared_server: Server) -> None:
    """typescript-sdk#2499: resumed a second time, or by another process, it began again or skipped.

    With tokens that depend on the attempt, preempts in between, and two cuts on the way: the text that its client put
    together is, byte by byte, what one hears who reads the stream in one piece.
    """
    chance = random.Random(2499)

    async def one(clients: list[httpx.AsyncClient], n: int) -> bool:
        prompt = [n, *range(5)]
        turns = cycle(clients if n % 2 else clients[::-1])
        parts = [await post_part(next(turns), COMPLETIONS, body(prompt, 90), chance.randrange(2, 25), RESUMABLE)]
        for most in (chance.randrange(1, 25), -1):
            if parts[-1].done:  # on a busy machine a frame may hold many tokens, and a few frames all of them
                break
            last_id = next(part.last_id for part in reversed(parts) if part.frames)
            parts.append(await get_part(next(turns), parts[0].id, last_id, most))
        cut = joined(parts)
        whole = await get_part(next(turns), parts[0].id)
        for found in (cut, whole):
            check_stream(found, prompt, 90, divergent=True)
        assert cut.choices[0].text == whole.choices[0].text
        return restarted(cut)

    async def crowd(urls: list[str]) -> int:
        async with client_of(urls[0]) as first, client_of(urls[1]) as second:
            return sum(await asyncio.gather(*(one([first, second], n) for n in range(24))))

    with site(shared_server, null=replace(DIVERGENT, step_ms=15)) as here:
        here.serve(Role.PREFILL, Role.DECODE, blocks=150)
        apis = [here.api(), here.api()]
        again = asyncio.run(crowd([api.url for api in apis]))
        assert again > 3, "hardly any was preempted"
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
