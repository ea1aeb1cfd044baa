"""The official client on the demo model: what it makes of real text."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.bed.serving import Serving

pytestmark = [pytest.mark.model, pytest.mark.slow, pytest.mark.timeout(240)]

CHAT: Any = {
    "model": "demo",
    "messages": [{"role": "user", "content": "What is the capital of France?"}],
    "temperature": 0,
    "max_tokens": 24,
}


@pytest.fixture
def client(plain: Serving) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{plain.url}/v1", api_key="none", max_retries=0, timeout=120) as found:
        yield found


def test_a_chat_whole_and_streamed_say_the_same_of_paris(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(**CHAT)
    chunks = list(client.chat.completions.create(**CHAT, stream=True, stream_options={"include_usage": True}))
    text = whole.choices[0].message.content or ""
    assert "Paris" in text
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == text
    told = chunks[-1].usage
    assert whole.usage is not None
    assert told is not None
    assert (told.prompt_tokens, told.completion_tokens) == (whole.usage.prompt_tokens, whole.usage.completion_tokens)
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == whole.choices[0].finish_reason


def test_the_logprobs_of_a_greedy_chat_are_of_its_likeliest_tokens_and_spell_its_text(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(**CHAT, logprobs=True, top_logprobs=3)
    (choice,) = answer.choices
    assert choice.logprobs is not None
    content = choice.logprobs.content or []
    assert answer.usage is not None
    assert len(content) == answer.usage.completion_tokens
    spelled = b"".join(bytes(each.bytes or ()) for each in content).decode()
    assert spelled.startswith(choice.message.content or "")  # behind it the token that ended it
    for each in content:
        likely = [top.logprob for top in each.top_logprobs]
        assert len(likely) == 3
        assert likely == sorted(likely, reverse=True)
        assert (each.token, each.logprob) == (each.top_logprobs[0].token, likely[0])
        assert sum(map(math.exp, likely)) <= 1 + 1e-5


def test_two_seeded_choices_differ_and_come_again(client: openai.OpenAI) -> None:
    asked: Any = {**CHAT, "n": 2, "temperature": 1.2, "seed": 7, "max_tokens": 16}
    first, again = (client.chat.completions.create(**asked) for _ in range(2))
    texts = [choice.message.content for choice in first.choices]
    assert [choice.index for choice in first.choices] == [0, 1]
    assert texts[0] != texts[1]
    assert [choice.message.content for choice in again.choices] == texts
    streamed = ["", ""]
    for chunk in client.chat.completions.create(**asked, stream=True):
        for choice in chunk.choices:
            streamed[choice.index] += choice.delta.content or ""
    assert streamed == texts


def test_a_completion_echoes_its_prompt_before_its_answer(client: openai.OpenAI) -> None:
    asked: Any = {"model": "demo", "prompt": "The sea is", "max_tokens": 8, "temperature": 0}
    plain, echoed = client.completions.create(**asked), client.completions.create(**asked, echo=True, logprobs=1)
    assert echoed.choices[0].text == f"The sea is{plain.choices[0].text}"
    reported = echoed.choices[0].logprobs
    assert reported is not None
    assert "".join(reported.tokens or ()).startswith("The sea is")
    assert (reported.token_logprobs or [0])[0] is None
