"""Admission over HTTP: who is refused, with what, and that a place is never given away twice."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest

from prelay_queue.client import SyncQueue
from prelay_queue.settings import QueueSettings
from prelay_worker.config import NullModel, Role
from tests.bed.bound import bound
from tests.bed.http import client_of, post
from tests.bed.processes import Api, fleet, until, until_ready
from tests.bed.scripted import ScriptedWorker
from tests.bed.servers import Server

COMPLETIONS = "/v1/completions"
SHAPE = {"message", "type", "param", "code"}


def body(**more: Any) -> dict[str, Any]:
    return {"model": "null", "prompt": [1, 2, 3, 4], "max_tokens": 5, **more}


def limited(server: Server, **limits: dict[str, int]) -> QueueSettings:
    return server.settings(**limits)


async def asked(api: Api, count: int, **more: Any) -> list[httpx.Response]:
    """So many requests at once, each held for a while and then left by its client if it is not answered."""
    async with client_of(api.url) as client:
        asking = [client.post(COMPLETIONS, json=body(**more), timeout=3) for _ in range(count)]
        found = await asyncio.gather(*asking, return_exceptions=True)
    return [reply for reply in found if isinstance(reply, httpx.Response)]


def error_of(reply: httpx.Response) -> dict[str, Any]:
    error: dict[str, Any] = reply.json()["error"]
    assert set(error) == SHAPE
    return error


def test_a_request_without_a_place_is_a_429_that_says_when_to_come_back(
    shared_server: Server, null_folder: Path
) -> None:
    with fleet(limited(shared_server, max_queued_jobs={"normal": 2}), null_folder) as found:
        api = found.api()
        worker = ScriptedWorker(found.queue)
        with httpx.Client(base_url=api.url) as client:
            for _ in range(2):  # their clients wait for a first token
                client.send(client.build_request("POST", COMPLETIONS, json=body(stream=True)), stream=True)
            until(lambda: worker.queue.redis.zcard(worker.queue.keys.queued) == 2)
            refused = post(api.url + COMPLETIONS, json=body())
            error = error_of(refused)
            assert (refused.status_code, error["type"], error["code"]) == (429, "requests", "rate_limit_exceeded")
            assert "class normal: 2 jobs wait, 1 more were asked for, and at most 2 may wait" in error["message"]
            seconds = int(refused.headers["retry-after"])
            assert seconds >= 1
            assert error["message"].endswith(f"try again in {seconds} s")
            urgent = post(api.url + COMPLETIONS, json=body(priority="interactive", deadline_ms=300))
            assert urgent.status_code == 504  # it has a place, and nobody to run it
            worker.take()
            taken = post(api.url + COMPLETIONS, json=body(deadline_ms=300))
            assert taken.status_code == 504
        worker.close()


def test_tokens_of_prompts_that_wait_are_limited_too(shared_server: Server, null_folder: Path) -> None:
    with fleet(limited(shared_server, max_queued_tokens={"normal": 100}), null_folder) as found:
        api = found.api()
        queue = SyncQueue(found.queue)
        with httpx.Client(base_url=api.url) as client:
            request = client.build_request("POST", COMPLETIONS, json=body(prompt=[1] * 90, stream=True))
            client.send(request, stream=True)
            until(lambda: queue.redis.zcard(queue.keys.queued) == 1)
            refused = post(api.url + COMPLETIONS, json=body(prompt=[1] * 11))
            assert (refused.status_code, error_of(refused)["type"]) == (429, "tokens")
            assert "90 tokens of prompts wait, 11 more were asked for" in error_of(refused)["message"]
            assert post(api.url + COMPLETIONS, json=body(prompt=[1] * 10, deadline_ms=300)).status_code == 504
        queue.close()


def test_two_processes_never_give_away_the_same_place(shared_server: Server, null_folder: Path) -> None:
    with fleet(limited(shared_server, max_queued_jobs={"normal": 7}), null_folder) as found:
        apis = [found.api(), found.api()]
        queue = SyncQueue(found.queue)

        async def crowd() -> list[list[httpx.Response]]:
            return await asyncio.gather(*(asked(api, 30) for api in apis))

        replies = [reply for found_by in asyncio.run(crowd()) for reply in found_by]
        assert {reply.status_code for reply in replies} == {429}
        assert len(replies) == 60 - 7  # the seven that were taken never got an answer: nobody works here
        until(lambda: not queue.redis.exists(queue.keys.waiting))  # and their clients left
        queue.close()


def test_all_choices_of_a_request_count(shared_server: Server, null_folder: Path) -> None:
    with fleet(limited(shared_server, max_queued_jobs={"normal": 4}), null_folder) as found:
        api = found.api()
        replies = asyncio.run(asked(api, 3, n=2))
        assert [reply.status_code for reply in replies] == [429]


def test_a_refused_request_leaves_nothing(shared_server: Server, null_folder: Path) -> None:
    with fleet(limited(shared_server, max_queued_jobs={"normal": 1}), null_folder) as found:
        api = found.api()
        queue = SyncQueue(found.queue)
        assert len(asyncio.run(asked(api, 9))) == 8
        assert len(queue.redis.keys(queue.keys.job("*"))) == 1
        until(lambda: not queue.redis.exists(queue.keys.waiting))
        assert not queue.redis.exists(queue.keys.queued, queue.keys.leases)
        queue.close()


@pytest.mark.parametrize("limits", [{"max_queued_jobs": {"normal": 0}}, {}])
def test_without_a_limit_nobody_is_refused(
    shared_server: Server, null_folder: Path, limits: dict[str, dict[str, int]]
) -> None:
    with fleet(limited(shared_server, **limits), null_folder) as found:
        assert asyncio.run(asked(found.api(), 40)) == []


def refusal(url: str) -> httpx.Response | None:
    """The answer to one more request, if that is a 503."""
    answer = post(url + COMPLETIONS, json=body())
    return answer if answer.status_code == 503 else None


def test_from_four_fifths_of_its_memory_on_redis_takes_no_new_requests_and_drains_the_old(
    own_server: Server, null_folder: Path
) -> None:
    with fleet(own_server.settings(), null_folder) as found:
        api = found.api()
        found.worker(Role.UNIFIED, null=NullModel(step_ms=5))
        until_ready(api.url)
        with httpx.stream("POST", api.url + COMPLETIONS, json=body(max_tokens=300, stream=True)) as running:
            used = int(own_server.client.info("memory")["used_memory"])
            own_server.client.config_set("maxmemory", int(used / 0.9))
            refused = until(bound(refusal, api.url))
            assert error_of(refused)["code"] == "queue_full"
            assert int(refused.headers["retry-after"]) > 0
            assert list(running.iter_lines())[-2] == "data: [DONE]"
        own_server.client.config_set("maxmemory", used * 10)
        until(lambda: post(api.url + COMPLETIONS, json=body()).status_code == 200)
