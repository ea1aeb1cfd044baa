"""Public faults of the API, as tests on the real model: where texts end, and whose tokens they are."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from prelay_text.tokenizer import Tokenizer
from tests.bed.http import post
from tests.bed.serving import Serving

from .client import Answer, stream, together

pytestmark = [pytest.mark.model, pytest.mark.timeout(180)]

STORY = {"model": "demo", "prompt": "Once upon a time", "temperature": 0, "max_tokens": 40, "ignore_eos": True}
CHAT = {
    "model": "demo",
    "messages": [{"role": "user", "content": "What is the capital of France?"}],
    "temperature": 0,
    "max_tokens": 60,
}


def whole(server: Serving, body: dict[str, Any]) -> dict[str, Any]:
    """The answer in one piece."""
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    reply = post(f"{server.url}{path}", json=body, timeout=60)
    assert reply.status_code == 200, reply.text
    return dict(reply.json())


def text_of(answer: dict[str, Any]) -> str:
    (choice,) = answer["choices"]
    return str(choice["message"]["content"] if "message" in choice else choice["text"])


@pytest.fixture(scope="module")
def tokenizer(demo_model: Path) -> Tokenizer:
    return Tokenizer.load(demo_model)


# --- stop strings


def test_a_stop_string_of_several_tokens_cuts_the_stream_and_the_whole_before_it(
    plain: Serving, tokenizer: Tokenizer
) -> None:
    """Case 5, vllm#3574: parts of a stop string are sent before it is complete, or text before it is lost."""
    free = text_of(whole(plain, STORY))
    middle = len(free) // 2
    stop = free[middle - 5 : middle + 6]  # from the middle of a word to the middle of another
    assert len(tokenizer.encode(stop)) > 2
    expected = free[: free.index(stop)]

    streamed, answer = stream(plain.url, {**STORY, "stop": stop}), whole(plain, {**STORY, "stop": stop})
    streamed.check()
    assert streamed.text == text_of(answer) == expected
    assert streamed.finish == [answer["choices"][0]["finish_reason"]] == ["stop"]


def test_a_stop_string_that_never_completes_takes_nothing_away(plain: Serving) -> None:
    """Case 5: the answer ends while a stop string may have begun."""
    free = text_of(whole(plain, STORY))
    body = {**STORY, "stop": [free[-9:] + "¤", free[10:30] + "¤"]}

    streamed, answer = stream(plain.url, body), whole(plain, body)
    streamed.check()
    assert streamed.text == text_of(answer) == free
    assert streamed.finish == ["length"]


# --- a prompt that ends inside a character


@pytest.mark.parametrize("bytes_given", [1, 2])
def test_a_prompt_that_ends_inside_a_character_shows_none_of_it_and_the_same_text_streamed_and_whole(
    plain: Serving, tokenizer: Tokenizer, bytes_given: int
) -> None:
    """Case 6, vllm#48853: text of the prompt comes out, or characters that only the stream has, or bytes stay in."""
    letters = {tokenizer.token_bytes(token): token for token in range(tokenizer.vocab_size)}
    beginning = [letters[bytes([byte])] for byte in "€".encode()[:bytes_given]]
    prompt = [*tokenizer.encode("The price of the old lamp was"), *beginning]
    for length in range(1, 5):  # an answer that ends inside a character is flushed
        body = {**STORY, "prompt": prompt, "max_tokens": length}
        streamed, answer = stream(plain.url, body), whole(plain, body)
        streamed.check()
        assert streamed.text == text_of(answer)
        assert "lamp" not in streamed.text
        assert answer["usage"]["completion_tokens"] == length


def test_a_character_that_the_answer_leaves_open_comes_out_at_its_end(plain: Serving, tokenizer: Tokenizer) -> None:
    """Case 6: forced to the first byte of a character, streamed and whole tell the same one replacement."""
    letters = {tokenizer.token_bytes(token): token for token in range(tokenizer.vocab_size)}
    body = {**STORY, "max_tokens": 1, "logit_bias": {str(letters[b"\xe2"]): 100}}
    assert stream(plain.url, body).text == text_of(whole(plain, body)) == "\ufffd"


# --- a seed among those that have none


def test_a_seeded_answer_is_its_own_beside_unseeded_ones(plain: Serving) -> None:
    """Case 12, vllm#51226: in a batch with unseeded requests a seed gives other tokens than alone."""
    seeded: dict[str, Any] = {**STORY, "temperature": 1, "seed": 7, "max_tokens": 24}
    unseeded = {name: value for name, value in seeded.items() if name != "seed"}
    alone = stream(plain.url, seeded)
    answers: list[Answer] = together(plain.url, [seeded, unseeded, unseeded, seeded, unseeded])
    assert answers[0].text == answers[3].text == alone.text
    assert len({answer.text for answer in answers}) > 1
    with ThreadPoolExecutor(2) as pool:
        beside = pool.submit(whole, plain, unseeded)
        assert text_of(whole(plain, seeded)) == alone.text
        beside.result()


# --- the natural end


def test_a_chat_ends_by_itself_and_shows_no_special_token(plain: Serving) -> None:
    """Case 13, kserve#4490: the end token's name is part of the text."""
    streamed, answer = stream(plain.url, CHAT), whole(plain, CHAT)
    streamed.check()
    assert streamed.finish == ["stop"]
    assert streamed.text == text_of(answer)
    assert "<|" not in streamed.text
    assert streamed.text.strip()


def test_a_special_token_works_as_a_stop_string(plain: Serving) -> None:
    """Case 13: where the end token is told to end nothing, its name as a stop string does."""
    natural = stream(plain.url, CHAT)
    body = {**CHAT, "ignore_eos": True, "stop": "<|im_end|>"}
    streamed, answer = stream(plain.url, body), whole(plain, body)
    streamed.check()
    assert streamed.text == text_of(answer) == natural.text
    assert streamed.finish == [answer["choices"][0]["finish_reason"]] == ["stop"]
    assert len(stream(plain.url, {**CHAT, "ignore_eos": True}).text) > len(natural.text)
