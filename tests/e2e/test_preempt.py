"""Preemption on the real model: the client's stream is the undisturbed one, whatever was evicted and how often."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import httpx
import orjson
import pytest

from tests.bed.http import get, post
from tests.bed.serving import Serving

from .client import Answer, counted, frames, reported, stream, together

pytestmark = [pytest.mark.model, pytest.mark.timeout(300)]

QUESTIONS = (
    "Tell me about the sea.",
    "How do I bake bread?",
    "What is a prime number?",
    "Why is the sky blue?",
    "Who wrote Don Quixote?",
    "Name three rivers in Europe and say where they end.",
    "Explain what an émigré is. Use a few words of French.",
    "Write a haiku about snow ❄.",
)


def chat(question: str, **changes: Any) -> dict[str, Any]:
    body = {"model": "demo", "messages": [{"role": "user", "content": question}], "temperature": 0, "max_tokens": 40}
    return {**body, "ignore_eos": True, **changes}


#: Tokens of an answer that is preempted: many more than any preempt is asked for at, for the engine runs on meanwhile.
LONG = 120


def completion(**changes: Any) -> dict[str, Any]:
    body = {"model": "demo", "prompt": "In the year 2050, the largest city", "max_tokens": 40, "ignore_eos": True}
    return {**body, **changes}


def preempt(server: Serving, request: str) -> int:
    """Ask for a preempt; the status code."""
    return post(f"{server.url}/admin/jobs/{request}/preempt", timeout=10).status_code


def preempting_at(server: Serving, *tokens: int) -> Any:
    """A callback for `stream` that asks for a preempt of an attempt when so many tokens have been delivered.

    One for each attempt: tokens that were on their way at a preempt may bring the answer to the next number, too.
    """
    left, asked = sorted(tokens), 0

    def on_frame(answer: Answer) -> None:
        nonlocal asked
        epoch, seq = answer.cursors[-1]
        if left and epoch > asked and seq + 1 >= left[0]:
            left.pop(0)
            asked = epoch
            assert preempt(server, answer.id) == 202

    return on_frame


@pytest.mark.slow
def test_a_pool_too_small_for_eight_chats_serves_them_all_undisturbed(tight: Serving) -> None:
    bodies = [chat(question) for question in QUESTIONS]
    alone = [stream(tight.url, body) for body in bodies]

    crowded = together(tight.url, bodies)

    for one, other in zip(alone, crowded, strict=True):
        one.check()
        other.check()
        assert other.text == one.text
        assert other.usage == one.usage
    assert any(len(answer.epochs) > 1 for answer in crowded), "nothing was preempted: the pool is not small enough"


GREEDY = {"temperature": 0}
SEEDED = {"temperature": 1.0, "seed": 7, "top_p": 0.95}


@pytest.mark.slow
@pytest.mark.parametrize("sampling", [GREEDY, SEEDED], ids=["greedy", "seeded"])
def test_preempts_in_mid_stream_change_nothing(tight: Serving, sampling: dict[str, Any]) -> None:
    check_preempts_in_mid_stream(tight, sampling)


@pytest.mark.slow
@pytest.mark.parametrize("sampling", [GREEDY, SEEDED], ids=["greedy", "seeded"])
def test_preempts_in_mid_stream_change_nothing_in_bf16(tight_bf16: Serving, sampling: dict[str, Any]) -> None:
    check_preempts_in_mid_stream(tight_bf16, sampling)


def check_preempts_in_mid_stream(server: Serving, sampling: dict[str, Any]) -> None:
    body = completion(max_tokens=LONG, **sampling)
    undisturbed = stream(server.url, body)

    for points in ((1,), (10, 20, 30)):
        answer = stream(server.url, body, preempting_at(server, *points))
        answer.check()
        assert answer.text == undisturbed.text
        assert answer.usage == undisturbed.usage
        assert answer.epochs[-1] == 1 + len(points), answer.cursors


def test_preempts_neither_lose_nor_double_a_logprob(tight: Serving) -> None:
    """sglang#26510, here with penalties, whose counts a restart could lose too."""
    body = completion(**SEEDED, max_tokens=LONG, logprobs=5, repetition_penalty=1.2, frequency_penalty=0.5)
    undisturbed = post(f"{tight.url}/v1/completions", json=body, timeout=60).json()

    answer = stream(tight.url, body, preempting_at(tight, 5, 15, 30))

    answer.check()
    assert len(answer.epochs) == 4
    assert answer.text == undisturbed["choices"][0]["text"]
    assert len(answer.logprobs) == undisturbed["usage"]["completion_tokens"] == LONG
    assert answer.logprobs == reported(undisturbed["choices"][0])


def test_a_prompt_s_logprobs_come_once_and_are_the_model_s(tight: Serving) -> None:
    body = completion(temperature=0, max_tokens=4, prompt_logprobs=1, logprobs=1)
    choice = post(f"{tight.url}/v1/completions", json=body, timeout=60).json()["choices"][0]
    assert choice["prompt_logprobs"][0] is None
    # The first answer's token is the likeliest after the prompt; as part of a prompt it has the same figure.
    grown = completion(temperature=0, max_tokens=1, prompt_logprobs=0, prompt=body["prompt"] + choice["text"])
    again = post(f"{tight.url}/v1/completions", json=grown, timeout=60).json()["choices"][0]["prompt_logprobs"]
    place = len(choice["prompt_logprobs"])
    values = [found["logprob"] for each in again[1:] for found in each.values()]
    assert values[: place - 1] == [
        min(found["logprob"] for found in each.values()) for each in choice["prompt_logprobs"][1:]
    ]
    assert values[place - 1 :] == choice["logprobs"]["token_logprobs"]


@pytest.mark.slow
def test_a_preempt_past_the_bound_still_evicts(tight: Serving) -> None:
    body = completion(temperature=0, max_tokens=LONG)
    undisturbed = stream(tight.url, body)

    answer = stream(tight.url, body, preempting_at(tight, *range(2, 37, 5)))

    answer.check()
    assert answer.text == undisturbed.text
    assert len(answer.epochs) > 4


@pytest.mark.slow
def test_a_preempted_whole_response_counts_once(tight: Serving) -> None:
    # The id of a whole response is known only at its end: the tight pool itself does the preempting here.
    bodies = [completion(temperature=0, prompt=f"{n} years after the flood, the largest city") for n in range(1, 9)]
    with httpx.Client(base_url=tight.url, timeout=120, verify=False) as client:

        def ask(body: dict[str, Any]) -> dict[str, Any]:
            answer: dict[str, Any] = client.post("/v1/completions", json=body).json()
            return answer

        alone = [ask(body) for body in bodies]
        with ThreadPoolExecutor(len(bodies)) as pool:
            crowded = list(pool.map(ask, bodies))
        epochs = [client.get(f"/admin/jobs/{answer['id']}").json() for answer in crowded]

    for one, other in zip(alone, crowded, strict=True):
        assert other["choices"] == one["choices"]
        assert counted(other["usage"]) == counted(one["usage"])
        assert other["usage"]["completion_tokens"] == 40
    assert any(choice["epoch"] > 1 for job in epochs for choice in job["choices"]), "nothing was preempted"


def test_every_choice_survives_a_preempt_of_all(tight: Serving) -> None:
    body = completion(temperature=0.8, seed=11, n=3, max_tokens=24)
    undisturbed = post(f"{tight.url}/v1/completions", json=body, timeout=60).json()
    found = _stream_choices(tight, body)

    assert found.texts == {c["index"]: c["text"] for c in undisturbed["choices"]}
    assert found.reasons == {key: ["length"] for key in range(3)}
    choices = get(f"{tight.url}/admin/jobs/{found.id}", timeout=10).json()["choices"]
    assert found.asked, "the preempt met no choice that ran"
    assert all(choice["epoch"] > 1 for choice in choices if choice["index"] in found.asked), choices


@dataclass
class Choices:
    """A streamed request of several choices: texts and finish reasons by index, and who was asked to give up."""

    id: str = ""
    texts: dict[int, str] = field(default_factory=dict)
    reasons: dict[int, list[str]] = field(default_factory=dict)
    asked: set[int] | None = None  # indices of the choices that a worker ran at the preempt


def _stream_choices(server: Serving, body: dict[str, Any]) -> Choices:
    """Stream to the end, with one preempt of all choices after a few tokens."""
    found = Choices()
    with httpx.stream(
        "POST", f"{server.url}/v1/completions", json={**body, "stream": True}, timeout=60, verify=False
    ) as response:
        for _, data in frames(response):
            if data == "[DONE]":
                break
            event = orjson.loads(data)
            found.id = event["id"]
            for choice in event["choices"]:
                found.texts[choice["index"]] = found.texts.get(choice["index"], "") + choice["text"]
                if choice["finish_reason"]:
                    found.reasons.setdefault(choice["index"], []).append(choice["finish_reason"])
            if found.asked is None and sum(map(len, found.texts.values())) > 60:
                told = post(f"{server.url}/admin/jobs/{found.id}/preempt", timeout=10)
                assert told.status_code == 202
                found.asked = {choice["index"] for choice in told.json()["choices"] if choice["asked"]}
    return found
