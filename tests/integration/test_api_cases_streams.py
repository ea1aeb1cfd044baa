"""Public faults of streams, as tests: what is counted, what is numbered, and how a stream ends that cannot go on."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from prelay_worker.config import NullModel, Role
from tests.bed.chain import Listener, Stream, check_chain, check_stream, stream, usage
from tests.bed.http import client_of
from tests.bed.processes import Api, Fleet, fast_times, fleet, until, until_ready
from tests.bed.servers import Server
from tests.bed.tokenizer import chat

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
PROMPT, TOKENS = [7, 8], 20
BODIES: dict[str, dict[str, Any]] = {
    COMPLETIONS: {"model": "null", "prompt": PROMPT, "max_tokens": TOKENS},
    CHAT: {"model": "null", "messages": chat(PROMPT), "max_tokens": TOKENS},
}


@pytest.fixture(scope="module")
def api(shared_server: Server, null_folder: Path) -> Iterator[Api]:
    with fleet(shared_server.settings(), null_folder) as found:
        api = found.api()
        found.worker(Role.PREFILL)
        found.worker(Role.DECODE)
        until_ready(api.url)
        yield api


# --- usage


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("options", ["absent", None, {}, {"include_usage": False}, {"include_usage": True}], ids=str)
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
async def test_a_stream_tells_its_usage_once_and_only_when_asked(api: Api, path: str, options: object, n: int) -> None:
    """Case 7, vllm#36379: usage comes unasked, with choices, or counts one choice of several."""
    body = {**BODIES[path], "n": n, **({} if options == "absent" else {"stream_options": options})}
    async with client_of(api.url) as client:
        found = await stream(client, path, body)
        whole = (await client.post(path, json=body)).json()
    check_stream(found, PROMPT, TOKENS, choices=n, chat=path == CHAT)
    assert whole["usage"] == usage(len(PROMPT), n * TOKENS)
    told = [each for each in found.bodies if each.get("usage") is not None]
    if options == {"include_usage": True}:
        assert [each["usage"] for each in told] == [whole["usage"]]
        assert told == found.bodies[-1:]
        assert told[0]["choices"] == []
        assert all("usage" in each for each in found.bodies)
    else:
        assert told == []
        assert all(each["choices"] for each in found.bodies)


# --- indices


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
async def test_each_of_several_choices_has_one_beginning_and_one_end(api: Api, path: str) -> None:
    """Case 8, sglang#8417: a choice of several has no role, or two ends."""
    async with client_of(api.url) as client:
        found = await stream(client, path, {**BODIES[path], "n": 3})
        whole = (await client.post(path, json={**BODIES[path], "n": 3})).json()
    check_stream(found, PROMPT, TOKENS, choices=3, chat=path == CHAT)
    assert [choice["index"] for choice in whole["choices"]] == [0, 1, 2]
    assert [choice["finish_reason"] for choice in whole["choices"]] == ["length"] * 3


async def test_the_choices_of_several_prompts_are_numbered_through(api: Api) -> None:
    """Case 8 with a list of prompts: choice i belongs to prompt i // n."""
    prompts = [[7, 8], [9]]
    body = {**BODIES[COMPLETIONS], "prompt": prompts, "n": 3}
    async with client_of(api.url) as client:
        found = await stream(client, COMPLETIONS, {**body, "stream_options": {"include_usage": True}})
        whole = (await client.post(COMPLETIONS, json=body)).json()
    assert found.error is None
    assert found.done
    assert sorted(found.choices) == [choice["index"] for choice in whole["choices"]] == list(range(6))
    for index, heard in found.choices.items():
        assert heard.finishes == ["length"]
        assert len(heard.ids) == TOKENS
        check_chain(prompts[index // 3], heard.ids)
        assert heard.text == whole["choices"][index]["text"]
    assert found.usage == whole["usage"] == usage(3, 6 * TOKENS)


# --- ends


def test_a_job_that_kills_every_worker_ends_its_stream_with_an_error_and_done(
    shared_server: Server, null_folder: Path
) -> None:
    """Case 20, litellm#39748: when the last try fails in mid-stream, the connection is closed without a word."""
    poison = 999
    with fleet(shared_server.settings(times=fast_times()), null_folder) as found:
        api = found.api()
        found.worker(Role.PREFILL)
        with restarted(found, Role.DECODE, NullModel(poison_token=poison)) as restart:
            until_ready(api.url)
            client = Listener(api.url, COMPLETIONS, {**BODIES[COMPLETIONS], "prompt": [1, poison]})
            until(lambda: restart() or client.found.done, timeout_s=60)
    ended = client.end()
    assert len(ended.choices[0].ids) >= 1, "it was to break in mid-stream"
    assert_error_then_done(ended)


@contextlib.contextmanager
def restarted(found: Fleet, role: Role, null: NullModel) -> Iterator[Any]:
    """A worker; the yielded function starts another one where it has died."""
    workers = [found.worker(role, null=null)]

    def restart() -> None:
        if workers[-1].code is not None:
            workers.append(found.worker(role, null=null))

    yield restart


def assert_error_then_done(found: Stream) -> None:
    assert found.error is not None
    assert found.error["code"] == "worker_crashed"
    assert "error" in found.bodies[-1]
    assert found.choices[0].finishes == []
    assert found.done
