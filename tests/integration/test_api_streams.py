"""Streams and answers of a whole fleet of null workers, every token checked."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from prelay_worker.config import Role
from tests.bed.bound import bound
from tests.bed.chain import Listener, check_chain, check_stream, expected_chain, stream, usage
from tests.bed.http import client_of
from tests.bed.processes import Api, fleet, until, until_ready
from tests.bed.scripted import ScriptedWorker
from tests.bed.servers import Server
from tests.bed.tokenizer import chat, ids_of, words

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


@pytest.fixture(scope="module")
def api(any_server: Server, null_folder: Path) -> Iterator[Api]:
    """A prefill and a decode worker behind an API, on a server of each kind."""
    with fleet(any_server.settings(), null_folder) as found:
        api = found.api()
        found.worker(Role.PREFILL)
        found.worker(Role.DECODE)
        until_ready(api.url)
        yield api


def body(prompt: list[int], **more: Any) -> dict[str, Any]:
    return {"model": "null", "prompt": prompt, "max_tokens": 40, **more}


async def test_a_completion_streams_the_chain_and_ends_once(api: Api) -> None:
    async with client_of(api.url) as client:
        found = await stream(client, COMPLETIONS, body([1, 2, 3]))
    check_stream(found, [1, 2, 3], 40)
    assert found.usage is None
    assert found.headers["content-type"].startswith("text/event-stream")
    assert found.headers["cache-control"] == "no-cache"
    assert found.headers["x-accel-buffering"] == "no"


async def test_a_chat_streams_one_role_and_the_chain(api: Api) -> None:
    async with client_of(api.url) as client:
        found = await stream(client, CHAT, {"model": "null", "messages": chat([4, 5], [6]), "max_tokens": 40})
    check_stream(found, [4, 5, 6], 40, chat=True)


async def test_three_choices_share_one_stream_and_each_is_whole(api: Api) -> None:
    options = {"n": 3, "stream_options": {"include_usage": True}}
    async with client_of(api.url) as client:
        found = await stream(client, COMPLETIONS, body([7, 8], **options))
    check_stream(found, [7, 8], 40, choices=3)
    assert found.usage == usage(2, 120)
    assert [frame.data for frame in found.frames[-2:]][1] == b"[DONE]"
    assert found.bodies[-1]["choices"] == []


async def test_one_answer_in_a_piece_equals_the_stream(api: Api) -> None:
    async with client_of(api.url) as client:
        whole = (await client.post(COMPLETIONS, json=body([9, 9], n=2))).json()
        found = await stream(client, COMPLETIONS, body([9, 9], n=2))
    for choice in whole["choices"]:
        assert choice["text"] == found.choices[choice["index"]].text
        assert choice["finish_reason"] == "length"
    assert whole["usage"]["completion_tokens"] == 80


async def test_a_stop_string_ends_the_text_before_it(api: Api) -> None:
    chain = expected_chain([3, 1], 40)
    stop = words(chain[10:12])
    async with client_of(api.url) as client:
        found = await stream(client, COMPLETIONS, body([3, 1], stop=[stop]))
        whole = (await client.post(COMPLETIONS, json=body([3, 1], stop=[stop]))).json()
    assert found.choices[0].finishes == ["stop"]
    assert found.choices[0].ids == chain[:10]
    assert whole["choices"][0]["text"] == found.choices[0].text
    assert whole["usage"]["completion_tokens"] == 12  # the tokens of the stop string were made


async def test_one_token_is_an_answer(api: Api) -> None:
    async with client_of(api.url) as client:
        found = await stream(client, COMPLETIONS, body([5], max_tokens=1))
    check_stream(found, [5], 1)


async def test_many_streams_at_once_never_mix(api: Api) -> None:
    async def one(client: httpx.AsyncClient, n: int) -> None:
        prompt = [n, n + 1, random.randrange(1000)]
        found = await stream(client, COMPLETIONS, body(prompt, max_tokens=20 + n))
        check_stream(found, prompt, 20 + n)

    async with client_of(api.url) as client:
        await asyncio.gather(*(one(client, n) for n in range(48)))


def test_the_official_client_streams_and_asks_unchanged(api: Api) -> None:
    client = openai.OpenAI(base_url=f"{api.url}/v1", api_key="none", max_retries=0)
    chunks = list(
        client.chat.completions.create(
            model="null", messages=chat([11, 12]), max_tokens=30, stream=True,
            stream_options={"include_usage": True},
        )  # type: ignore[call-overload]
    )  # fmt: skip
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    check_chain([11, 12], ids_of(text))
    assert chunks[-1].usage.completion_tokens == 30
    whole = client.completions.create(model="null", prompt=[11, 12], max_tokens=30)
    assert ids_of(whole.choices[0].text) == ids_of(text)
    assert [model.id for model in client.models.list()] == ["null"]
    with pytest.raises(openai.NotFoundError, match="not served here"):
        client.completions.create(model="other", prompt="t1")
    client.close()


def test_the_official_client_is_content_with_comments_between_tokens(quiet_api: Api, scripted: ScriptedWorker) -> None:
    client = openai.OpenAI(base_url=f"{quiet_api.url}/v1", api_key="none", max_retries=0)
    messages: Any = chat([1])
    answer = client.chat.completions.create(model="null", messages=messages, stream=True)
    raw = Listener(quiet_api.url, CHAT, {"model": "null", "messages": chat([2])})
    claims = [scripted.take(), scripted.take()]
    for seq in range(3):
        for claim in claims:
            scripted.emit(claim, seq, [seq])
        until(bound(lambda seen: len(raw.ids) > seen, seq))
        comments = raw.found.comments
        until(bound(lambda seen: raw.found.comments >= seen + 2, comments))
    for claim in claims:
        scripted.finish(claim, 3, [3])
    text = "".join(chunk.choices[0].delta.content or "" for chunk in answer if chunk.choices)
    assert ids_of(text) == [0, 1, 2, 3]
    assert raw.end().choices[0].ids == [0, 1, 2, 3]
    client.close()


def test_the_official_client_raises_what_ends_a_stream(quiet_api: Api, scripted: ScriptedWorker) -> None:
    client = openai.OpenAI(base_url=f"{quiet_api.url}/v1", api_key="none", max_retries=0)
    answer = client.completions.create(model="null", prompt=[3], stream=True)
    claim = scripted.take()
    scripted.emit(claim, 0, [3])
    assert ids_of(next(answer).choices[0].text) == [3]
    body = '{"message": "it broke", "type": "server_error", "code": "broken"}'
    scripted.finish(claim, 1, [], reason="error", error=body)
    with pytest.raises(openai.APIError, match="it broke"):
        list(answer)
    client.close()
