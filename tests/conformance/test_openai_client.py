"""The official client, unchanged: every way in which it asks, and what it makes of what goes wrong."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx2
import openai
import pydantic
import pytest
from openai.types.chat import ChatCompletionChunk

from prelay_worker.config import Role
from prelay_worker.null import null_logprob
from tests.bed.chain import expected_chain
from tests.bed.http import get
from tests.bed.processes import fleet, until, until_ready
from tests.bed.servers import Server
from tests.bed.serving import Serving
from tests.bed.tokenizer import chat, ids_of

PROMPT = [11, 12]
TOKENS = 30
EXPECTED = expected_chain(PROMPT, TOKENS)
CHAT: Any = {"model": "null", "messages": chat(PROMPT), "max_tokens": TOKENS}
COMPLETION: Any = {"model": "null", "prompt": PROMPT, "max_tokens": TOKENS}


@pytest.fixture
def client(server: Serving) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as found:
        yield found


@pytest.fixture
async def async_client(server: Serving) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as found:
        yield found


# --- answers


def test_a_chat_and_a_completion_come_whole(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(**CHAT)
    other = client.completions.create(**COMPLETION)
    assert ids_of(answer.choices[0].message.content or "") == ids_of(other.choices[0].text) == EXPECTED
    assert (answer.object, other.object) == ("chat.completion", "text_completion")
    assert answer.choices[0].finish_reason == other.choices[0].finish_reason == "length"
    assert answer.choices[0].message.role == "assistant"
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (2, 30, 32)


def test_a_stream_says_what_the_whole_answer_says_and_ends_with_its_usage(client: openai.OpenAI) -> None:
    chunks = list(client.chat.completions.create(**CHAT, stream=True, stream_options={"include_usage": True}))
    assert ids_of(text_of(chunks)) == EXPECTED
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == "length"
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == TOKENS
    assert len({chunk.id for chunk in chunks}) == 1
    parts = list(client.completions.create(**COMPLETION, stream=True))
    assert ids_of("".join(part.choices[0].text for part in parts)) == EXPECTED


def text_of(chunks: list[ChatCompletionChunk], index: int = 0) -> str:
    choices = [choice for chunk in chunks for choice in chunk.choices if choice.index == index]
    return "".join(choice.delta.content or "" for choice in choices)


def test_several_answers_come_with_their_indices(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(**CHAT, n=3)
    chunks = list(client.chat.completions.create(**CHAT, n=3, stream=True))
    assert [choice.index for choice in whole.choices] == [0, 1, 2]
    for choice in whole.choices:
        assert ids_of(choice.message.content or "") == ids_of(text_of(chunks, choice.index)) == EXPECTED


async def test_the_async_client_asks_and_streams_many_at_once(async_client: openai.AsyncOpenAI) -> None:
    async def whole(n: int) -> None:
        answer = await async_client.completions.create(**{**COMPLETION, "prompt": [n]})
        assert ids_of(answer.choices[0].text) == expected_chain([n], TOKENS)

    async def streamed(n: int) -> None:
        stream = await async_client.chat.completions.create(**{**CHAT, "messages": chat([n])}, stream=True)
        chunks = [chunk async for chunk in stream]
        assert ids_of(text_of(chunks)) == expected_chain([n], TOKENS)

    await asyncio.gather(*(ask(n) for n in range(12) for ask in (whole, streamed)))


# --- the helper for streams

#: The helper takes an answer that ends at max_tokens for an error: here one of its tokens ends it.
SHORT = EXPECTED[: EXPECTED.index(EXPECTED[20])]
STOPPED: Any = {**CHAT, "extra_body": {"stop_token_ids": [EXPECTED[20]]}}


def test_the_stream_helper_tells_each_piece_and_the_whole(client: openai.OpenAI) -> None:
    asked = {**STOPPED, "logprobs": True, "top_logprobs": 1, "stream_options": {"include_usage": True}}
    with client.chat.completions.stream(**asked) as stream:
        events = list(stream)
        final = stream.get_final_completion()
    pieces = [event.delta for event in events if event.type == "content.delta"]
    (done,) = [event for event in events if event.type == "content.done"]
    assert ids_of("".join(pieces)) == ids_of(done.content) == SHORT
    (reported,) = [event for event in events if event.type == "logprobs.content.done"]
    assert [each.logprob for each in reported.content] == [null_logprob(token) for token in (*SHORT, EXPECTED[20])]
    message = final.choices[0].message
    assert (message.content, message.role) == (done.content, "assistant")
    assert final.choices[0].finish_reason == "stop"
    assert final.usage is not None
    assert final.usage.completion_tokens == len(SHORT) + 1


def test_the_stream_helper_takes_an_answer_that_was_cut_for_an_error_of_its_own(client: openai.OpenAI) -> None:
    with client.chat.completions.stream(**CHAT) as stream, pytest.raises(openai.LengthFinishReasonError) as caught:
        stream.get_final_completion()
    assert ids_of(caught.value.completion.choices[0].message.content or "") == EXPECTED


async def test_the_async_stream_helper_gathers_every_choice(async_client: openai.AsyncOpenAI) -> None:
    async with async_client.chat.completions.stream(**STOPPED, n=2) as stream:
        final = await stream.get_final_completion()
    assert [ids_of(choice.message.content or "") for choice in final.choices] == [SHORT, SHORT]


# --- responses as they are


def test_the_raw_response_has_the_id_in_its_header(client: openai.OpenAI) -> None:
    raw = client.chat.completions.with_raw_response.create(**CHAT)
    answer = raw.parse()
    assert raw.status_code == 200
    assert raw.headers["x-request-id"] == raw.request_id == answer.id == answer._request_id
    assert raw.headers["content-type"] == "application/json"
    with client.chat.completions.with_streaming_response.create(**CHAT, stream=True) as response:
        lines = [line for line in response.iter_lines() if line.startswith("data: ")]
        assert lines[-1] == "data: [DONE]"
        assert response.headers["x-request-id"] in lines[0]


def test_the_models_are_listed_and_looked_up(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["null"]
    model = client.models.retrieve("null")
    assert (model.id, model.object, model.owned_by) == ("null", "model", "prelay")
    with pytest.raises(openai.NotFoundError, match="'other' is not served here"):
        client.models.retrieve("other")


def test_what_openai_lacks_goes_through_the_extra_body(client: openai.OpenAI) -> None:
    extra = {"top_k": 5, "min_p": 0.1, "repetition_penalty": 1.2, "min_tokens": 2, "ignore_eos": True}
    answer = client.chat.completions.create(**CHAT, extra_body=extra)
    assert ids_of(answer.choices[0].message.content or "") == EXPECTED
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(**CHAT, extra_body={"top_k": 0.5})
    assert caught.value.param == "top_k"


# --- what goes wrong


class Sea(pydantic.BaseModel):
    name: str


@pytest.mark.parametrize(
    ("changes", "kind", "param", "code"),
    [
        ({"temperature": 3}, openai.BadRequestError, "temperature", "invalid_value"),
        ({"messages": []}, openai.BadRequestError, "messages", "invalid_value"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, openai.BadRequestError, "tools", None),
        ({"response_format": {"type": "json_object"}}, openai.BadRequestError, "response_format", None),
        ({"max_tokens": 10**6}, openai.BadRequestError, "max_tokens", "context_length_exceeded"),
        ({"model": "other"}, openai.NotFoundError, "model", "model_not_found"),
        ({"messages": [{"role": "user", "content": "t1 " * 3_000_000}]}, openai.APIStatusError, None, None),
    ],
    ids=lambda value: str(value)[:40],
)
@pytest.mark.parametrize("streaming", [False, True])
def test_an_error_is_the_client_s_own_exception_for_it(
    client: openai.OpenAI,
    changes: dict[str, Any],
    kind: type[openai.APIStatusError],
    param: str | None,
    code: str | None,
    streaming: bool,
) -> None:
    with pytest.raises(kind) as caught:
        client.chat.completions.create(**{**CHAT, **changes}, stream=streaming)
    error = caught.value
    assert type(error) is kind
    assert error.type == "invalid_request_error"
    assert error.param == param
    assert code is None or error.code == code
    if kind is openai.APIStatusError:
        assert (error.status_code, error.code) == (413, "request_too_large")


def test_an_answer_in_a_schema_is_refused_by_name(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="response_format is not implemented"):
        client.chat.completions.parse(**CHAT, response_format=Sea)


def test_what_is_not_served_is_a_not_found_error(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError):
        client.embeddings.create(model="null", input="x")
    with pytest.raises(openai.NotFoundError):
        client.responses.create(model="null", input="x")


def test_a_stream_that_its_reader_closes_is_given_up_by_the_server(client: openai.OpenAI, server: Serving) -> None:
    stream = client.completions.create(**{**COMPLETION, "max_tokens": 3000}, stream=True)
    first = next(stream)
    stream.close()
    job = f"{server.url}/admin/jobs/{first.id}"
    until(lambda: get(job).json()["choices"][0]["finish_reason"] == "cancelled")
    server.until_drained()


def test_the_client_asks_again_after_the_time_that_a_503_tells(own_server: Server, null_folder: Path) -> None:
    answers: list[tuple[int, str | None]] = []

    def heard(response: httpx2.Response) -> None:
        tries = response.request.headers["x-stainless-retry-count"]
        answers.append((response.status_code, tries))
        if response.status_code == 503:
            assert int(response.headers["retry-after"]) > 0
            own_server.start()

    with fleet(own_server.settings(), null_folder) as found:
        api = found.api()
        found.worker(Role.UNIFIED)
        until_ready(api.url)
        own_server.kill()
        transport = httpx2.Client(event_hooks={"response": [heard]})
        with openai.OpenAI(base_url=f"{api.url}/v1", api_key="none", max_retries=2, http_client=transport) as client:
            answer = client.completions.create(**COMPLETION)
    assert ids_of(answer.choices[0].text) == EXPECTED
    assert answers == [(503, "0"), (200, "1")]


@pytest.mark.parametrize("retries", [0, 1])
def test_a_503_that_stays_is_an_internal_server_error(own_server: Server, null_folder: Path, retries: int) -> None:
    with fleet(own_server.settings(), null_folder) as found:
        api = found.api()
        own_server.kill()
        client = openai.OpenAI(base_url=f"{api.url}/v1", api_key="none", max_retries=retries)
        with client, pytest.raises(openai.InternalServerError, match="Redis") as caught:
            client.chat.completions.create(**CHAT)
    assert (caught.value.status_code, caught.value.code) == (503, "service_unavailable")
