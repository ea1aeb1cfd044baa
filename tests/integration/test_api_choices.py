"""Several answers to one request, the prompt before its answer, token ids: what an answer may consist of.

The null model's log-probability of a token follows from its id, so one at a wrong place shows.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

import openai
import pytest

from prelay_queue.note import Note, TokenLogprobs
from prelay_worker.config import Role
from prelay_worker.null import null_logprob
from tests.bed.chain import Listener, Stream, check_chain, expected_chain, stream, usage
from tests.bed.http import client_of, post
from tests.bed.processes import Api, fleet, until, until_ready
from tests.bed.scripted import ScriptedWorker
from tests.bed.servers import Server
from tests.bed.tokenizer import chat, ids_of, words

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
WITH_USAGE = {"include_usage": True}


@pytest.fixture(scope="module")
def api(shared_server: Server, null_folder: Path) -> Iterator[Api]:
    with fleet(shared_server.settings(), null_folder) as found:
        api = found.api()
        for role in (Role.PREFILL, Role.DECODE):
            found.worker(role)
        until_ready(api.url)
        yield api


def body(prompt: Any, **more: Any) -> dict[str, Any]:
    return {"model": "null", "prompt": prompt, "max_tokens": 20, **more}


async def ask(api: Api, asked: dict[str, Any], path: str = COMPLETIONS) -> dict[str, Any]:
    async with client_of(api.url) as client:
        reply = await client.post(path, json=asked)
    assert reply.status_code == 200, reply.text
    found: dict[str, Any] = reply.json()
    return found


async def listen(api: Api, asked: dict[str, Any], path: str = COMPLETIONS) -> Stream:
    async with client_of(api.url) as client:
        return await stream(client, path, asked)


# --- prompt lists


@pytest.mark.parametrize("prompts", [[[1, 2], [3]], ["t1 t2", "t3"]], ids=["ids", "texts"])
async def test_each_prompt_of_a_list_has_its_n_answers_in_order(api: Api, prompts: Any) -> None:
    """sglang#8417: indices 0 … 5, each with one finish reason."""
    asked = body(prompts, n=3, stream_options=WITH_USAGE)
    whole, found = await ask(api, asked), await listen(api, asked)
    assert [choice["index"] for choice in whole["choices"]] == list(range(6))
    assert sorted(found.choices) == list(range(6))
    for choice in whole["choices"]:
        heard = found.choices[choice["index"]]
        assert (heard.finishes, choice["finish_reason"]) == (["length"], "length")
        assert heard.text == choice["text"]
        check_chain([1, 2] if choice["index"] < 3 else [3], heard.ids)
        assert len(heard.ids) == 20
    assert whole["usage"] == found.usage == usage(3, 120)


async def test_three_answers_of_a_chat_have_one_role_and_one_end_each(api: Api) -> None:
    asked = {"model": "null", "messages": chat([4, 5]), "n": 3, "max_tokens": 9, "stream_options": WITH_USAGE}
    found, whole = await listen(api, asked, CHAT), await ask(api, asked, CHAT)
    assert sorted(found.choices) == [0, 1, 2]
    assert all((heard.roles, heard.finishes) == (1, ["length"]) for heard in found.choices.values())
    assert [each["message"]["content"] for each in whole["choices"]] == [found.choices[i].text for i in range(3)]
    assert whole["usage"] == found.usage == usage(2, 27)


async def test_a_prompt_of_a_list_that_does_not_fit_is_named(api: Api) -> None:
    async with client_of(api.url) as client:
        reply = await client.post(COMPLETIONS, json=body([[1], [5] * 5000]))
        other = await client.post(COMPLETIONS, json=body([[1], [2, 10**6]]))
    assert reply.status_code == other.status_code == 400
    assert "prompt[1] has 5000 tokens" in reply.json()["error"]["message"]
    assert "prompt[1][1] is 1000000, but token ids go from 0 to" in other.json()["error"]["message"]


def test_a_preempt_of_one_choice_of_one_prompt_disturbs_no_other(quiet_api: Api, scripted: ScriptedWorker) -> None:
    client = Listener(quiet_api.url, COMPLETIONS, body([[1], [2]], n=2, stream_options=WITH_USAGE))
    claims = {claim.spec.choice: claim for claim in (scripted.take() for _ in range(4))}
    assert [claims[index].spec.prompt_ids for index in range(4)] == [(1,), (1,), (2,), (2,)]
    for index, claim in claims.items():
        scripted.emit(claim, 0, [index, 10 + index])
    until(lambda: len(client.found.choices) == 4 and all(len(c.ids) == 2 for c in client.found.choices.values()))
    scripted.preempt(claims[2])
    again = scripted.take()
    assert (again.id, again.ids) == (claims[2].id, (2, 12))
    for index, claim in {**claims, 2: again}.items():
        scripted.finish(claim, 2, [20 + index])
    found = client.end()
    assert {index: heard.ids for index, heard in found.choices.items()} == {i: [i, 10 + i, 20 + i] for i in range(4)}
    assert found.usage == usage(2, 12)


# --- the best of several


def note(value: float) -> str:
    return Note(TokenLogprobs(value, 1)).encode()


def test_the_answers_with_the_likeliest_tokens_are_shown_best_first(quiet_api: Api, scripted: ScriptedWorker) -> None:
    """By the mean over the tokens: the longest is not the worst for its length."""
    with ThreadPoolExecutor(1) as pool:
        reply = pool.submit(post, quiet_api.url + COMPLETIONS, json=body([1, 2], n=2, best_of=4))
        answers_of_four(scripted)
        answer = reply.result().json()
    shown = [(choice["index"], ids_of(choice["text"])) for choice in answer["choices"]]
    assert shown == [(0, [16, 17]), (1, [11, 12, 13])]
    assert all(choice["logprobs"] is None for choice in answer["choices"])
    assert answer["usage"] == usage(2, 8)  # of all four: each was computed


def answers_of_four(scripted: ScriptedWorker) -> None:
    """Four candidates whose tokens' mean log-probabilities are -2, -1, -1.75 and -0.875."""
    claims = {claim.spec.choice: claim for claim in (scripted.take() for _ in range(4))}
    answers = {
        0: ([10], [-2.0]),
        1: ([11, 12, 13], [-1.0, -1.0, -1.0]),
        2: ([14, 15], [-3.0, -0.5]),
        3: ([16, 17], [-0.5, -1.25]),
    }
    for index, (ids, values) in answers.items():
        scripted.finish(claims[index], 0, ids, notes=[note(value) for value in values])


# --- the prompt before its answer


async def test_the_prompt_stands_before_each_answer(api: Api) -> None:
    asked = body(["t1 t2", "t3"], n=2, echo=True)
    whole, found = await ask(api, asked), await listen(api, asked)
    for choice in whole["choices"]:
        prompt = [1, 2] if choice["index"] < 2 else [3]
        assert choice["text"] == found.choices[choice["index"]].text
        ids = ids_of(choice["text"])
        assert ids[: len(prompt)] == prompt
        check_chain(prompt, ids[len(prompt) :])
        assert choice["text"].startswith(words(prompt))
    assert whole["usage"] == usage(3, 80)


def legacy(parts: list[dict[str, Any]]) -> dict[str, list[Any]]:
    """The logprobs of all chunks of one choice as one."""
    return {name: [item for part in parts for item in part[name]] for name in parts[0]}


@pytest.mark.parametrize("count", [0, 2])
async def test_the_prompts_tokens_are_reported_before_the_answers(api: Api, count: int) -> None:
    """vllm#47815: offsets that never fall, and at each of them the token; vllm#6521: null for the first token."""
    asked = body([7, 8, 9], echo=True, logprobs=count)
    whole, found = await ask(api, asked), await listen(api, asked)
    (choice,) = whole["choices"]
    parts = [each["choices"][0]["logprobs"] for each in found.bodies if each["choices"][0]["logprobs"]]
    assert legacy(parts) == choice["logprobs"]
    told = choice["logprobs"]
    ids = ids_of(" ".join(told["tokens"]))
    assert ids[:3] == [7, 8, 9]
    assert len(ids) == 23
    assert told["token_logprobs"] == [None, *map(null_logprob, ids[1:])]
    assert told["top_logprobs"][0] is None
    assert all(top[token] == null_logprob(i) for top, token, i in zip(
        told["top_logprobs"][1:], told["tokens"][1:], ids[1:], strict=True))  # fmt: skip
    offsets = told["text_offset"]
    assert all(before <= after for before, after in pairwise(offsets))
    # The bed's tokenizer joins words by a space of the next one, as Llama's does; at the start of a text it drops it.
    assert choice["text"].startswith(told["tokens"][0].strip())
    pairs = zip(told["tokens"][1:], offsets[1:], strict=True)
    assert all(choice["text"][offset:].startswith(token) for token, offset in pairs)


@pytest.mark.parametrize("streamed", [False, True])
async def test_the_prompt_alone_with_its_logprobs(api: Api, streamed: bool) -> None:
    """vllm#6521: no token is made that counts, and the answer ends by its length."""
    asked = body([7, 8, 9], echo=True, logprobs=1, max_tokens=0, stream_options=WITH_USAGE)
    if streamed:
        found = await listen(api, asked)
        text, finish, told = found.choices[0].text, found.choices[0].finishes, found.usage
        parts = [each["choices"][0]["logprobs"] for each in found.bodies if each["choices"]]
        logprobs = legacy([part for part in parts if part])
    else:
        whole = await ask(api, asked)
        (choice,) = whole["choices"]
        text, finish, told = choice["text"], [choice["finish_reason"]], whole["usage"]
        logprobs = choice["logprobs"]
    assert (ids_of(text), finish, told) == ([7, 8, 9], ["length"], usage(3, 0))
    assert logprobs["token_logprobs"] == [None, null_logprob(8), null_logprob(9)]


def test_a_preempt_before_the_first_token_was_shown_repeats_no_prompt(quiet_api: Api, scripted: ScriptedWorker) -> None:
    client = Listener(quiet_api.url, COMPLETIONS, body([1, 2], echo=True))
    first = scripted.take()
    scripted.preempt(first)
    second = scripted.take()
    scripted.emit(second, 0, [10])
    until(lambda: client.ids == [1, 2, 10])
    scripted.preempt(second)
    scripted.finish(scripted.take(), 1, [11])
    assert client.end().choices[0].ids == [1, 2, 10, 11]


# --- ids, usage, tier


@pytest.mark.parametrize("streamed", [False, True])
async def test_token_ids_are_told_where_vllm_tells_them(api: Api, streamed: bool) -> None:
    chain, asked = expected_chain([3, 4], 20), body([3, 4], return_token_ids=True)
    talk = {"model": "null", "messages": chat([3, 4]), "max_tokens": 20, "return_token_ids": True}
    if streamed:
        chunks = [each["choices"][0] for each in (await listen(api, asked)).bodies]
        assert [each["prompt_token_ids"] for each in chunks if "prompt_token_ids" in each] == [[3, 4]]
        assert "prompt_token_ids" in chunks[0]
        assert [token for each in chunks for token in each["token_ids"]] == chain
        bodies = (await listen(api, talk, CHAT)).bodies
        assert [each.get("prompt_token_ids") for each in bodies] == [[3, 4]] + [None] * (len(bodies) - 1)
        assert [token for each in bodies for token in each["choices"][0]["token_ids"]] == chain
    else:
        (choice,) = (await ask(api, asked))["choices"]
        assert (choice["prompt_token_ids"], choice["token_ids"]) == ([3, 4], chain)
        answer = await ask(api, talk, CHAT)
        assert (answer["prompt_token_ids"], answer["choices"][0]["token_ids"]) == ([3, 4], chain)
    assert "token_ids" not in (await ask(api, body([3, 4])))["choices"][0]


async def test_usage_grows_with_every_chunk_up_to_the_usage_of_all(api: Api) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    found = await listen(api, body([5, 6], n=2, stream_options=options))
    told = [each["usage"]["completion_tokens"] for each in found.bodies]
    assert told == sorted(told)
    assert told[-1] == told[-2] == 40
    assert {each["usage"]["prompt_tokens"] for each in found.bodies} == {2}
    assert found.usage == usage(2, 40)
    heard = 0
    for each in found.bodies[:-1]:
        heard += len(ids_of(each["choices"][0]["text"]))
        assert each["usage"]["completion_tokens"] == heard


@pytest.mark.parametrize(("asked", "told"), [("auto", "default"), ("flex", "flex"), (None, None)])
async def test_the_tier_that_served_a_chat_is_told_if_one_was_asked_for(
    api: Api, asked: str | None, told: str | None
) -> None:
    talk = {"model": "null", "messages": chat([1]), "max_tokens": 2, "service_tier": asked}
    assert (await ask(api, talk, CHAT)).get("service_tier") == told
    assert {each.get("service_tier") for each in (await listen(api, talk, CHAT)).bodies} == {told}


async def test_an_answer_goes_on_with_the_last_message(api: Api) -> None:
    turns = [*chat([1, 2]), {"role": "assistant", "content": "t3 t4"}]
    answer = await ask(api, {"model": "null", "messages": turns, "max_tokens": 9, "continue_final_message": True}, CHAT)
    check_chain([1, 2, 3, 4], ids_of(answer["choices"][0]["message"]["content"]))


def test_the_official_client_understands_all_of_it(api: Api) -> None:
    client = openai.OpenAI(base_url=f"{api.url}/v1", api_key="none", max_retries=0)
    whole = client.completions.create(
        model="null", prompt=["t1", "t2"], n=1, best_of=2, echo=True, logprobs=0, max_tokens=3
    )
    assert [choice.index for choice in whole.choices] == [0, 1]
    assert whole.choices[0].logprobs is not None
    assert whole.usage is not None
    assert whole.usage.completion_tokens == 12
    answer = client.chat.completions.create(
        model="null", messages=chat([1]), n=2, max_tokens=3, service_tier="flex",
        extra_body={"return_token_ids": True, "chat_template_kwargs": {"enable_thinking": False}},
    )  # type: ignore[call-overload]  # fmt: skip
    assert answer.service_tier == "flex"
    assert answer.choices[1].token_ids == expected_chain([1], 3)
    client.close()
