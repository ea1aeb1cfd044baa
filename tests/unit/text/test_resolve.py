from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from prelay_text.errors import RequestError
from prelay_text.request import ChatRequest, CompletionRequest, Message
from prelay_text.resolve import JobPart, Limits, choice_seed, resolve
from prelay_text.tokenizer import Tokenizer

LIMITS = Limits(context_len=64)


def parts(tokenizer: Tokenizer, limits: Limits = LIMITS, spare_seed: int = 1, **values: Any) -> list[JobPart]:
    """The parts of a completion of one `prompt` or of several `prompts`."""
    prompts = values.pop("prompts", None) or (values.pop("prompt"),)
    return resolve(CompletionRequest(model="m", prompts=prompts, **values), tokenizer, limits, spare_seed=spare_seed)


def test_each_choice_has_the_prompt_and_a_seed_of_its_own(byte_level: Tokenizer) -> None:
    found = parts(byte_level, prompt=(5, 6), n=3, seed=9, max_tokens=4, temperature=0.5, top_k=3, stop=("x",))
    assert [part.choice for part in found] == [0, 1, 2]
    assert {part.prompt_ids for part in found} == {(5, 6)}
    assert [part.sampling.seed for part in found] == [choice_seed(9, choice) for choice in range(3)]
    assert len({part.sampling.seed for part in found}) == 3
    sampling = found[0].sampling
    assert (sampling.max_tokens, sampling.temperature, sampling.top_k, sampling.stop) == (4, 0.5, 3, ("x",))


def test_seeds_are_unsigned_64_bits_and_never_change_between_versions() -> None:
    assert choice_seed(0, 0) == 11027925886793108079
    assert choice_seed(-1, 5) == choice_seed(2**64 - 1, 5) == 10598650846949775078
    assert all(0 <= choice_seed(seed, 0) < 2**64 for seed in (0, -(2**63), 2**64 - 1))


def test_a_request_without_seed_uses_the_spare_one(byte_level: Tokenizer) -> None:
    assert parts(byte_level, prompt=(5,), spare_seed=77) == parts(byte_level, prompt=(5,), seed=77)
    assert parts(byte_level, prompt=(5,), seed=0, spare_seed=77) == parts(byte_level, prompt=(5,), seed=0)


@pytest.mark.parametrize("ids", [(422,), (-1,), (2**40,), (5, 10**30)])
def test_ids_outside_the_vocabulary_are_refused_with_the_limit(byte_level: Tokenizer, ids: tuple[int, ...]) -> None:
    for name in ("prompt", "stop_token_ids"):
        values: dict[str, Any] = {"prompt": (5,), name: ids}
        with pytest.raises(RequestError, match=r"token ids go from 0 to 421") as caught:
            parts(byte_level, **values)
        assert (caught.value.param, caught.value.status) == (name, 400)
        assert f"{name}[{len(ids) - 1}] is {ids[-1]}" in caught.value.message
    assert parts(byte_level, prompt=(0, 421), stop_token_ids=(421,))


def test_a_text_that_encodes_beyond_the_models_embedding_is_refused(model_folder: Callable[..., Path]) -> None:
    tokenizer = Tokenizer.load(model_folder(config={"vocab_size": 421, "max_position_embeddings": 64}))
    with pytest.raises(RequestError, match="token ids go from 0 to 420"):
        parts(tokenizer, prompt="a Ġq")


def test_a_bias_for_an_id_outside_the_vocabulary_is_refused_with_the_limit(byte_level: Tokenizer) -> None:
    with pytest.raises(RequestError, match=r"logit_bias\[1\] is 422, but token ids go from 0 to 421"):
        parts(byte_level, prompt=(5,), logit_bias=((5, 1.0), (422, 1.0)))
    assert parts(byte_level, prompt=(5,), logit_bias=((421, 1.0),))[0].sampling.logit_bias == ((421, 1.0),)


def test_more_tokens_cannot_be_asked_for_than_there_may_be(byte_level: Tokenizer) -> None:
    with pytest.raises(RequestError, match="min_tokens is 5, more than the 4 tokens that the answer may have"):
        parts(byte_level, prompt=(5,), max_tokens=4, min_tokens=5)
    assert parts(byte_level, prompt=(5,), max_tokens=4, min_tokens=4)[0].sampling.min_tokens == 4


def test_of_a_prompt_alone_no_tokens_can_be_asked_for(byte_level: Tokenizer) -> None:
    with pytest.raises(RequestError, match="min_tokens is 1, more than the 0 tokens") as caught:
        parts(byte_level, prompt=(5,), max_tokens=0, echo=True, min_tokens=1)
    assert caught.value.param == "min_tokens"
    assert parts(byte_level, prompt=(5,), max_tokens=0, echo=True)[0].sampling.max_tokens == 1  # that nobody sees


def test_a_bad_word_is_banned_at_the_beginning_and_after_a_space(byte_level: Tokenizer) -> None:
    (part,) = parts(byte_level, prompt=(5,), bad_words=("dog", " dog", "the"))
    forms = [tuple(byte_level.encode(text)) for text in ("dog", " dog", "the", " the")]
    assert part.sampling.bad_words == tuple(forms)
    assert len(set(forms)) == 4


def test_an_empty_prompt_is_refused_unless_the_tokenizer_starts_it(
    byte_level: Tokenizer, model_folder: Callable[..., Path]
) -> None:
    with pytest.raises(RequestError, match="prompt is empty") as caught:
        parts(byte_level, prompt="")
    assert caught.value.param == "prompt"
    tokenizer = Tokenizer.load(model_folder(bos=True))
    assert parts(tokenizer, prompt="")[0].prompt_ids == (tokenizer.token_id("<s>"),)


@pytest.mark.parametrize("room", [-1, 0])
@pytest.mark.parametrize("max_tokens", [None, 1, 10**9])
def test_a_prompt_that_leaves_no_room_names_both_numbers(
    byte_level: Tokenizer, room: int, max_tokens: int | None
) -> None:
    with pytest.raises(RequestError, match=f"{64 - room} tokens.*context limit of 64 tokens") as caught:
        parts(byte_level, prompt=(5,) * (64 - room), max_tokens=max_tokens)
    assert caught.value.code == "context_length_exceeded"


def test_max_tokens_is_clamped_when_absent_and_refused_when_it_cannot_fit(byte_level: Tokenizer) -> None:
    assert parts(byte_level, prompt=(5,) * 63)[0].sampling.max_tokens == 1
    assert parts(byte_level, prompt=(5,) * 63, max_tokens=1)[0].sampling.max_tokens == 1
    assert parts(byte_level, prompt=(5,) * 49)[0].sampling.max_tokens == 15
    assert parts(byte_level, prompt=(5,) * 10)[0].sampling.max_tokens == 16
    for max_tokens in (2, 10**9):
        with pytest.raises(RequestError, match=f"max_tokens is {max_tokens} and prompt has 63 tokens.*64") as caught:
            parts(byte_level, prompt=(5,) * 63, max_tokens=max_tokens)
        assert (caught.value.param, caught.value.code) == ("max_tokens", "context_length_exceeded")


def test_the_smaller_of_context_and_pool_binds(byte_level: Tokenizer) -> None:
    assert parts(byte_level, Limits(64, 32), prompt=(5,) * 20)[0].sampling.max_tokens == 12
    assert parts(byte_level, Limits(64, 500), prompt=(5,) * 50)[0].sampling.max_tokens == 14
    with pytest.raises(RequestError, match="the 32 tokens that the workers' memory holds"):
        parts(byte_level, Limits(64, 32), prompt=(5,), max_tokens=32)
    with pytest.raises(RequestError, match="no room"):
        parts(byte_level, Limits(64, 32), prompt=(5,) * 32)


def test_a_chat_is_rendered_and_gets_no_second_start_token(model_folder: Callable[..., Path]) -> None:
    template = "{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}"
    folder = model_folder(bos=True, tokenizer_config={"bos_token": "<s>", "chat_template": template})
    tokenizer = Tokenizer.load(folder)
    request = ChatRequest(model="m", messages=(Message("user", "dog"),))
    (part,) = resolve(request, tokenizer, LIMITS, spare_seed=1)
    assert part.prompt_ids == (tokenizer.token_id("<s>"), *tokenizer.encode("dog"))


def test_a_chat_that_cannot_be_rendered_or_is_empty_is_a_bad_request(
    byte_level: Tokenizer, model_folder: Callable[..., Path]
) -> None:
    request = ChatRequest(model="m", messages=(Message("user", ""),))
    with pytest.raises(RequestError, match="no chat template"):
        resolve(request, byte_level, LIMITS, spare_seed=1)
    template = "{{ messages[0].content }}"
    tokenizer = Tokenizer.load(model_folder(tokenizer_config={"chat_template": template}))
    with pytest.raises(RequestError, match="messages is empty"):
        resolve(request, tokenizer, LIMITS, spare_seed=1)
    long = ChatRequest(model="m", messages=(Message("user", "x y z " * 99),), max_tokens=1)
    with pytest.raises(RequestError, match=r"messages has \d+ tokens"):
        resolve(long, tokenizer, LIMITS, spare_seed=1)
