"""Requests that are sent again under an Idempotency-Key: one answer, whoever asks, as often as it is asked for."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from prelay_queue.state import State
from prelay_worker.config import NullModel, Role
from tests.bed.chain import check_stream
from tests.bed.http import client_of
from tests.bed.parts import Part, post_part
from tests.bed.processes import Api, fleet, until, until_ready
from tests.bed.scripted import ScriptedWorker
from tests.bed.servers import Server
from tests.bed.tokenizer import ids_of

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


@pytest.fixture(scope="module")
def two(shared_server: Server, null_folder: Path) -> Iterator[tuple[Api, Api]]:
    with fleet(shared_server.settings(), null_folder) as found:
        apis = found.api(), found.api()
        for role in (Role.PREFILL, Role.DECODE):
            found.worker(role, null=NullModel(step_ms=15))
        for api in apis:
            until_ready(api.url)
        yield apis


def body(prompt: list[int], **more: Any) -> dict[str, Any]:
    return {"model": "null", "prompt": prompt, "max_tokens": 40, "n": 2, **more}


def under(key: str, **more: str) -> dict[str, str]:
    return {"Idempotency-Key": key, **more}


async def test_the_stored_answer_is_given_again_on_any_process(two: tuple[Api, Api]) -> None:
    async with client_of(two[0].url) as here, client_of(two[1].url) as there:
        first = await here.post(COMPLETIONS, json=body([1]), headers=under("a"))
        again = await there.post(COMPLETIONS, json=dict(reversed(body([1]).items())), headers=under("a"))
        other = await there.post(COMPLETIONS, json=body([1]), headers=under("b"))
    assert first.status_code == again.status_code == 200
    assert again.json() == first.json()
    assert again.headers["x-request-id"] == first.headers["x-request-id"] != other.headers["x-request-id"]


async def test_clients_that_ask_at_once_get_one_answer(two: tuple[Api, Api]) -> None:
    """vllm#10583: one answer to both, never mixed."""
    async with client_of(two[0].url) as here, client_of(two[1].url) as there:
        asked: list[Any] = [
            client.post(COMPLETIONS, json=body([2]), headers=under("c")) for client in (here, there) * 3
        ]
        answers = [reply.json() for reply in await asyncio.gather(*asked)]
    assert {answer["id"] for answer in answers} == {answers[0]["id"]}
    assert all(answer == answers[0] for answer in answers)


async def test_a_stream_is_joined_from_its_start(two: tuple[Api, Api]) -> None:
    async with client_of(two[0].url) as here, client_of(two[1].url) as there:
        begun = Part()
        asking = asyncio.create_task(post_part(here, COMPLETIONS, body([3]), headers=under("d"), found=begun))
        await asyncio.to_thread(until, lambda: len(begun.frames) > 6)
        joined = await post_part(there, COMPLETIONS, body([3]), headers=under("d"))
        whole = await asking
    for found in (whole, joined):
        check_stream(found, [3], 40, choices=2)
    assert joined.id == whole.id


async def test_a_client_that_lost_its_connection_asks_again_and_gets_what_was_begun(two: tuple[Api, Api]) -> None:
    async with client_of(two[0].url) as here, client_of(two[1].url) as there:
        begun = await post_part(here, COMPLETIONS, body([4]), most=5, headers=under("e"))
        again = await post_part(there, COMPLETIONS, body([4]), headers=under("e"))
    assert again.id == begun.id
    check_stream(again, [4], 40, choices=2)


@pytest.mark.parametrize(("path", "asked"), [(COMPLETIONS, body([6])), (COMPLETIONS, body([5], stream=True))])
async def test_another_body_is_refused(two: tuple[Api, Api], path: str, asked: dict[str, Any]) -> None:
    async with client_of(two[0].url) as client:
        first = await client.post(COMPLETIONS, json=body([5]), headers=under("f"))
        reply = await client.post(path, json=asked, headers=under("f"))
        elsewhere = await client.post(
            CHAT, json={"model": "null", "messages": [{"role": "user", "content": "t5"}]}, headers=under("f")
        )
    assert first.status_code == 200
    for each in (reply, elsewhere):
        error = each.json()["error"]
        assert (each.status_code, error["code"], error["param"]) == (422, "idempotency_key_reused", "Idempotency-Key")
        assert first.headers["x-request-id"] in error["message"]


@pytest.mark.parametrize("key", ["", "x" * 256])
async def test_what_is_no_key_is_refused(two: tuple[Api, Api], key: str) -> None:
    async with client_of(two[0].url) as client:
        reply = await client.post(COMPLETIONS, json=body([5]), headers=under(key))
    assert reply.status_code == 400
    assert f"1 to 255 characters, not {len(key)}" in reply.json()["error"]["message"]


async def test_a_request_that_failed_is_begun_anew(quiet_api: Api, scripted: ScriptedWorker) -> None:
    async with client_of(quiet_api.url) as client:
        answers = []
        for reason, status in (("error", 500), ("stop", 200)):
            asking = asyncio.create_task(client.post(COMPLETIONS, json=body([7], n=1), headers=under("g")))
            claim = await asyncio.to_thread(scripted.take)
            scripted.finish(claim, 0, [10], reason, "{}" if reason == "error" else "")
            answers.append(await asking)
            assert answers[-1].status_code == status
        again = await client.post(COMPLETIONS, json=body([7], n=1), headers=under("g"))
    assert again.json() == answers[1].json()
    assert ids_of(again.json()["choices"][0]["text"]) == [10]


async def test_an_api_key_has_idempotency_keys_of_its_own(two: tuple[Api, Api]) -> None:
    async with client_of(two[0].url) as client:
        replies = [
            await client.post(COMPLETIONS, json=body([8]), headers=under("h", Authorization=f"Bearer {name}"))
            for name in ("one", "two")
        ]
    assert len({reply.headers["x-request-id"] for reply in replies}) == 2


async def test_neither_the_key_nor_the_body_can_be_read_in_the_queue(quiet_api: Api, scripted: ScriptedWorker) -> None:
    async with client_of(quiet_api.url) as client:
        asking = asyncio.create_task(client.post(COMPLETIONS, json=body([9], n=1), headers=under("very-secret")))
        claim = await asyncio.to_thread(scripted.take)
        assert scripted.state(claim.id)["st"] == State.DECODE
        keys: Any = scripted.queue.redis.keys("*")
        assert not [key for key in keys if b"very-secret" in key]
        assert "very-secret" not in " ".join(scripted.state(claim.id).values())
        scripted.finish(claim, 0, [1])
        assert (await asking).status_code == 200
