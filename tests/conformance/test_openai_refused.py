"""The official client where it may not ask, or not now: its own exceptions say so, and it comes back when told."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest

from prelay_queue.client import SyncQueue
from prelay_queue.settings import QueueSettings
from prelay_worker.config import Role
from tests.bed.chain import expected_chain
from tests.bed.processes import Api, fleet, until, until_ready
from tests.bed.servers import Server
from tests.bed.tokenizer import chat, ids_of

CHAT: Any = {"model": "null", "messages": chat([11, 12]), "max_tokens": 30}
KEYS = ("right-one", "right-two")


def client_of(api: Api, key: str = "none", **more: Any) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{api.url}/v1", api_key=key, **{"max_retries": 0, **more})


# --- keys


@pytest.fixture(scope="module")
def locked(shared_server: Server, null_folder: Path) -> Iterator[Api]:
    """A server that wants a key."""
    with fleet(shared_server.settings(), null_folder) as found:
        api = found.api(api_keys=KEYS)
        found.worker(Role.UNIFIED)
        until_ready(api.url)
        yield api


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("key", ["wrong", "right", "right-one2"])
def test_a_wrong_key_is_an_authentication_error(locked: Api, key: str, streaming: bool) -> None:
    with client_of(locked, key) as client, pytest.raises(openai.AuthenticationError) as caught:
        client.chat.completions.create(**CHAT, stream=streaming)
    assert (caught.value.status_code, caught.value.code) == (401, "invalid_api_key")
    assert caught.value.type == "invalid_request_error"
    assert key not in caught.value.message


def test_a_client_without_a_key_is_told_that_it_needs_one(locked: Api) -> None:
    with client_of(locked) as client, pytest.raises(openai.AuthenticationError, match="no API key") as caught:
        client.chat.completions.create(**CHAT, extra_headers={"Authorization": openai.omit})
    assert caught.value.code == "missing_api_key"


async def test_the_async_client_is_told_the_same(locked: Api) -> None:
    async with openai.AsyncOpenAI(base_url=f"{locked.url}/v1", api_key="wrong", max_retries=0) as client:
        with pytest.raises(openai.AuthenticationError):
            await client.models.list()


@pytest.mark.parametrize("key", KEYS)
def test_each_right_key_is_served(locked: Api, key: str) -> None:
    with client_of(locked, key) as client:
        assert [model.id for model in client.models.list()] == ["null"]
        answer = client.chat.completions.create(**CHAT)
    assert ids_of(answer.choices[0].message.content or "") == expected_chain([11, 12], 30)


def test_a_401_is_not_asked_again(locked: Api) -> None:
    answers: list[int] = []
    transport = httpx2.Client(event_hooks={"response": [lambda response: answers.append(response.status_code)]})
    client = client_of(locked, "wrong", max_retries=2, http_client=transport)
    with client, pytest.raises(openai.AuthenticationError):
        client.chat.completions.create(**CHAT)
    assert answers == [401]


# --- no place


@contextmanager
def full(server: Server, folder: Path) -> Iterator[tuple[Api, QueueSettings, openai.Stream[Any]]]:
    """A server on which one request may wait, and one waits: the stream of its client."""
    queue = replace(server.settings(), max_queued_jobs={"normal": 1})
    with fleet(queue, folder) as found:
        api = found.api()
        with client_of(api) as client:
            stream = client.completions.create(model="null", prompt=[5], max_tokens=5, stream=True)
            yield api, queue, stream
            stream.close()


@pytest.mark.parametrize("streaming", [False, True])
def test_a_request_without_a_place_is_a_rate_limit_error_that_says_when(
    shared_server: Server, null_folder: Path, streaming: bool
) -> None:
    with full(shared_server, null_folder) as (api, _, _), client_of(api) as client:
        with pytest.raises(openai.RateLimitError, match="at most 1 may wait") as caught:
            client.chat.completions.create(**CHAT, stream=streaming)
        assert (caught.value.status_code, caught.value.type) == (429, "requests")
        assert caught.value.code == "rate_limit_exceeded"
        assert int(caught.value.response.headers["retry-after"]) >= 1
        with pytest.raises(openai.APITimeoutError):  # of another class, it has a place, and nobody to run it
            client.chat.completions.create(**CHAT, service_tier="priority", timeout=0.5)


def test_the_client_comes_back_when_the_429_has_said_and_is_let_in(shared_server: Server, null_folder: Path) -> None:
    answers: list[int] = []
    with full(shared_server, null_folder) as (api, settings, waiting):
        queue = SyncQueue(settings)

        def heard(response: httpx2.Response) -> None:
            answers.append(response.status_code)
            if response.status_code == 429:
                waiting.close()
                until(lambda: not queue.redis.zcard(queue.keys.queued))

        transport = httpx2.Client(event_hooks={"response": [heard]})
        with client_of(api, max_retries=2, http_client=transport, timeout=3) as client:
            stream = client.chat.completions.create(**CHAT, stream=True)
            stream.close()
        queue.close()
    assert answers == [429, 200]
