"""Log-probabilities through the whole pipeline: one for each token of the answer, whatever is preempted or lost.

The null model's log-probability of a token follows from its id, so one at a wrong place shows.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from prelay_queue.note import Note, TokenLogprobs
from prelay_worker.config import Role
from prelay_worker.null import null_logprob
from tests.bed.chain import Listener, check_stream, stream
from tests.bed.http import client_of
from tests.bed.processes import Api, fleet, until, until_ready
from tests.bed.scripted import ScriptedWorker
from tests.bed.servers import Server
from tests.bed.tokenizer import chat, ids_of

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


@pytest.fixture(scope="module", params=["two phases", pytest.param("unified", marks=pytest.mark.slow)])
def api(shared_server: Server, null_folder: Path, request: pytest.FixtureRequest) -> Iterator[Api]:
    with fleet(shared_server.settings(), null_folder) as found:
        api = found.api()
        for role in [Role.UNIFIED] if request.param == "unified" else [Role.PREFILL, Role.DECODE]:
            found.worker(role)
        until_ready(api.url)
        yield api


def body(prompt: list[int], **more: Any) -> dict[str, Any]:
    return {"model": "null", "prompt": prompt, "max_tokens": 40, **more}


def check_legacy(text: str, logprobs: list[dict[str, Any]]) -> list[int]:
    """Lists of equal length, offsets that lead to each token's text; return the ids that the tokens show."""
    tokens = [token for part in logprobs for token in part["tokens"]]
    values = [value for part in logprobs for value in part["token_logprobs"]]
    offsets = [offset for part in logprobs for offset in part["text_offset"]]
    tops = [top for part in logprobs for top in part["top_logprobs"]]
    ids = ids_of(" ".join(tokens))
    assert len(tokens) == len(values) == len(offsets) == len(tops) == len(ids)
    assert values == [null_logprob(token) for token in ids]
    assert offsets == sorted(offsets)
    assert all(text[offset:].startswith(token) for token, offset in zip(tokens, offsets, strict=True))
    assert [top[token] for token, top in zip(tokens, tops, strict=True)] == values
    return ids


async def test_each_token_of_a_completion_comes_with_its_logprob_streamed_or_not(api: Api) -> None:
    async with client_of(api.url) as client:
        whole = (await client.post(COMPLETIONS, json=body([1, 2], logprobs=2))).json()
        found = await stream(client, COMPLETIONS, body([1, 2], logprobs=2))
    check_stream(found, [1, 2], 40)
    (choice,) = whole["choices"]
    parts = [each["choices"][0]["logprobs"] for each in found.bodies if each["choices"][0]["logprobs"]]
    assert check_legacy(choice["text"], [choice["logprobs"]]) == found.choices[0].ids
    assert check_legacy(choice["text"], parts) == found.choices[0].ids


async def test_the_tokens_of_a_stop_string_and_of_the_end_are_reported_too(api: Api) -> None:
    async with client_of(api.url) as client:
        free = (await client.post(COMPLETIONS, json=body([3, 1]))).json()["choices"][0]["text"]
        stop = free.split()[10]
        found = await stream(client, COMPLETIONS, body([3, 1], stop=[stop], logprobs=0))
        whole = (await client.post(COMPLETIONS, json=body([3, 1], stop=[stop], logprobs=0))).json()
    (choice,) = whole["choices"]
    assert len(choice["logprobs"]["tokens"]) == whole["usage"]["completion_tokens"] == 11
    parts = [each["choices"][0]["logprobs"] for each in found.bodies if each["choices"][0]["logprobs"]]
    assert [token for part in parts for token in part["tokens"]] == choice["logprobs"]["tokens"]
    assert check_legacy(free, parts) == ids_of(free)[:11]


def test_the_official_client_reads_them_of_chats(api: Api) -> None:
    client = openai.OpenAI(base_url=f"{api.url}/v1", api_key="none", max_retries=0)
    messages: Any = chat([5, 6])
    answer = client.chat.completions.create(
        model="null",
        messages=messages,
        max_tokens=9,
        logprobs=True,
        top_logprobs=1,
        n=2,
    )
    for choice in answer.choices:
        assert choice.logprobs is not None
        content = choice.logprobs.content
        assert content is not None
        ids = ids_of(choice.message.content or "")
        assert [item.logprob for item in content] == [null_logprob(token) for token in ids]
        assert bytes(byte for item in content for byte in item.bytes or ()).decode() == choice.message.content
        assert [[top.token for top in item.top_logprobs] for item in content] == [[item.token] for item in content]
    client.close()


async def test_nothing_is_reported_that_was_not_asked_for(api: Api) -> None:
    async with client_of(api.url) as client:
        whole = (await client.post(COMPLETIONS, json=body([4]))).json()
    assert whole["choices"][0]["logprobs"] is None
    assert "prompt_logprobs" not in whole["choices"][0]


async def test_the_prompt_s_tokens_are_reported_at_the_place_where_vllm_has_them(api: Api) -> None:
    async with client_of(api.url) as client:
        completion = (await client.post(COMPLETIONS, json=body([7, 8, 9], prompt_logprobs=0))).json()
        answer = (
            await client.post(CHAT, json={"model": "null", "messages": chat([7, 8, 9]), "prompt_logprobs": 0})
        ).json()
    expected = [None] + [
        {str(each): {"logprob": null_logprob(each), "rank": 1, "decoded_token": f" t{each}"}} for each in (8, 9)
    ]
    assert completion["choices"][0]["prompt_logprobs"] == expected
    assert answer["prompt_logprobs"] == expected


@pytest.mark.parametrize(
    ("route", "more", "words"),
    [
        (COMPLETIONS, {"logprobs": 21}, "logprobs must be an integer from 0 to 20, not 21"),
        (COMPLETIONS, {"logprobs": True}, "logprobs must be an integer from 0 to 20, not bool True"),
        (COMPLETIONS, {"prompt_logprobs": 1, "stream": True}, "send stream false"),
        (CHAT, {"top_logprobs": 3}, "top_logprobs is 3, but logprobs must be true for it"),
    ],
)
async def test_what_cannot_be_reported_is_refused(api: Api, route: str, more: dict[str, Any], words: str) -> None:
    prompt = {"prompt": [1]} if route == COMPLETIONS else {"messages": chat([1])}
    async with client_of(api.url) as client:
        reply = await client.post(route, json={"model": "null", **prompt, **more})
    assert reply.status_code == 400
    assert words in reply.json()["error"]["message"]


def note(value: float) -> str:
    return Note(TokenLogprobs(value, 1)).encode()


def logprobs_heard(client: Listener) -> list[float]:
    found = [each["choices"][0]["logprobs"] for each in client.found.bodies if each["choices"]]
    return [value for part in found if part for value in part["token_logprobs"]]


def test_a_preempt_discards_the_logprobs_of_what_was_not_delivered(quiet_api: Api, scripted: ScriptedWorker) -> None:
    """sglang#26510: as many log-probabilities as tokens, those of the attempt that made each."""
    client = Listener(quiet_api.url, COMPLETIONS, body([1], logprobs=0, stream_options={"include_usage": True}))
    first = scripted.take()
    scripted.emit(first, 0, [10], [note(-1.0)])
    until(lambda: client.ids == [10])
    scripted.preempt(first)
    second = scripted.take()
    assert second.ids == (10,)
    scripted.emit(second, 1, [21], [note(-2.1)])
    until(lambda: client.ids == [10, 21])
    scripted.finish(second, 2, [22], notes=[note(-2.2)])
    found = client.end()
    assert found.choices[0].ids == [10, 21, 22]
    assert logprobs_heard(client) == [-1.0, -2.1, -2.2]
    assert found.usage is not None
    assert found.usage["completion_tokens"] == 3


def test_logprobs_are_whole_after_redis_lost_everything(quiet_api: Api, scripted: ScriptedWorker) -> None:
    client = Listener(quiet_api.url, COMPLETIONS, body([1], logprobs=0))
    first = scripted.take()
    scripted.emit(first, 0, [10, 11], [note(-1.0), note(-1.1)])
    until(lambda: client.ids == [10, 11])
    keys = scripted.queue.keys
    scripted.queue.redis.delete(keys.job(first.id), keys.log(first.id))
    scripted.queue.redis.zrem(keys.leases, first.id)
    second = scripted.take(timeout_s=20)
    assert second.ids == (10, 11)
    scripted.finish(second, 2, [12], notes=[note(-1.2)])
    assert client.end().choices[0].ids == [10, 11, 12]
    assert logprobs_heard(client) == [-1.0, -1.1, -1.2]


def test_a_worker_that_forgets_a_logprob_ends_the_stream_with_an_error(
    quiet_api: Api, scripted: ScriptedWorker
) -> None:
    client = Listener(quiet_api.url, COMPLETIONS, body([1], logprobs=0))
    scripted.finish(scripted.take(), 0, [10])
    assert client.end().error is not None
