"""prelay.client: whatever breaks meanwhile, each chunk comes once."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from prelay.client import StreamError, astream, stream
from prelay_queue.job import Claim
from prelay_worker.config import NullModel, Role
from tests.bed.chain import expected_chain
from tests.bed.processes import Api, Fleet, fleet, until, until_ready
from tests.bed.scripted import ScriptedWorker
from tests.bed.servers import Server
from tests.bed.tokenizer import ids_of

COMPLETIONS = "/v1/completions"


def body(prompt: list[int], **more: Any) -> dict[str, Any]:
    return {"model": "null", "prompt": prompt, "max_tokens": 80, **more}


def text_of(chunks: list[dict[str, Any]]) -> str:
    return "".join(choice["text"] for chunk in chunks for choice in chunk["choices"])


@pytest.fixture(scope="module")
def served(shared_server: Server, null_folder: Path) -> Iterator[Fleet]:
    with fleet(shared_server.settings(), null_folder) as found:
        for role in (Role.PREFILL, Role.DECODE):
            found.worker(role, null=NullModel(step_ms=20))
        yield found


@pytest.fixture
def two(served: Fleet) -> list[Api]:
    apis = [served.api(), served.api()]
    for api in apis:
        until_ready(api.url)
    return apis


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_stream_goes_on_when_its_api_process_ends(two: list[Api], number: int) -> None:
    chunks = []
    for chunk in stream(COMPLETIONS, body([1, 2]), url=[api.url for api in two]):
        chunks.append(chunk)
        if len(chunks) == 10:
            two[0].send(number)
    assert ids_of(text_of(chunks)) == expected_chain([1, 2], 80)
    assert two[0].wait() is not None
    assert len({chunk["id"] for chunk in chunks}) == 1


async def test_the_asynchronous_one_goes_on_too(two: list[Api]) -> None:
    chunks = []
    async for chunk in astream(COMPLETIONS, body([3]), url=[api.url for api in two]):
        chunks.append(chunk)
        if len(chunks) == 5:
            two[0].send(signal.SIGKILL)
            await asyncio.sleep(0)
    assert ids_of(text_of(chunks)) == expected_chain([3], 80)


def test_a_request_that_no_process_took_is_sent_again(two: list[Api]) -> None:
    two[0].kill()
    found = list(stream(COMPLETIONS, body([4]), url=[api.url for api in two]))
    assert ids_of(text_of(found)) == expected_chain([4], 80)


def test_what_the_server_refuses_is_said_at_once(two: list[Api]) -> None:
    with pytest.raises(StreamError, match="400: temperature must be a number from 0 to 2, not 3") as caught:
        list(stream(COMPLETIONS, body([1], temperature=3), url=two[0].url))
    assert (caught.value.status, caught.value.code) == (400, "invalid_value")


def test_a_stream_that_fails_is_an_error(quiet_api: Api, scripted: ScriptedWorker) -> None:
    def delete() -> None:
        claim = scripted.take()
        scripted.emit(claim, 0, [10])
        until(lambda: bool(heard))
        httpx.delete(f"{quiet_api.url}/v1/streams/{heard[0]['id']}")

    heard: list[dict[str, Any]] = []
    thread = threading.Thread(target=delete)
    thread.start()
    with pytest.raises(StreamError, match="cancelled"):
        heard.extend(stream(COMPLETIONS, body([1]), url=quiet_api.url))
    thread.join()
    assert ids_of(text_of(heard)) == [10]


def test_patience_ends() -> None:
    with pytest.raises(StreamError, match=r"nothing heard for 0.3 s"):
        list(stream(COMPLETIONS, body([1]), url="http://127.0.0.1:9", patience_s=0.3))


def test_a_stream_whose_reader_has_enough_is_cancelled_at_once(quiet_api: Api, scripted: ScriptedWorker) -> None:
    claims: list[Claim] = []
    thread = threading.Thread(target=lambda: _begin(scripted, claims))
    thread.start()
    chunks = stream(COMPLETIONS, body([6]), url=quiet_api.url)
    assert ids_of(text_of([next(chunks)])) == [10]
    thread.join()
    chunks.close()
    assert scripted.state(claims[0].id)["fin"] == "cancelled"


async def test_so_is_that_of_the_asynchronous_one(quiet_api: Api, scripted: ScriptedWorker) -> None:
    claims: list[Claim] = []
    thread = threading.Thread(target=lambda: _begin(scripted, claims))
    thread.start()
    chunks = astream(COMPLETIONS, body([7]), url=quiet_api.url)
    assert ids_of(text_of([await anext(chunks)])) == [10]
    thread.join()
    await chunks.aclose()
    assert scripted.state(claims[0].id)["fin"] == "cancelled"


async def test_a_reader_that_is_cancelled_cancels_its_request(quiet_api: Api, scripted: ScriptedWorker) -> None:
    async def read() -> None:
        async for chunk in astream(COMPLETIONS, body([8]), url=quiet_api.url):
            heard.append(chunk)
            seen.set()

    heard: list[dict[str, Any]] = []
    seen, claims = asyncio.Event(), list[Claim]()
    thread = threading.Thread(target=lambda: _begin(scripted, claims))
    thread.start()
    reading = asyncio.create_task(read())
    await seen.wait()
    thread.join()
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading
    assert scripted.state(claims[0].id)["fin"] == "cancelled"
    assert ids_of(text_of(heard)) == [10]


def _begin(worker: ScriptedWorker, claims: list[Claim]) -> None:
    """Answer the next request with one token, and leave it there."""
    claims.append(worker.take())
    worker.emit(claims[0], 0, [10])
