"""/tokenize and /detokenize: the ids are those that a completion or a chat is computed with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest

from prelay_text.request import MAX_CHOICES
from tests.bed.chain import Listener
from tests.bed.http import get, post
from tests.bed.processes import Api
from tests.bed.scripted import ScriptedWorker
from tests.bed.tokenizer import CONTEXT, EOS_ID, WORDS, chat, words


def tokenize(api: Api, **body: Any) -> httpx.Response:
    return post(f"{api.url}/tokenize", json=body)


def detokenize(api: Api, **body: Any) -> httpx.Response:
    return post(f"{api.url}/detokenize", json=body)


def error_of(answer: httpx.Response, status: int = 400) -> dict[str, Any]:
    assert answer.status_code == status
    error: dict[str, Any] = answer.json()["error"]
    return error


def test_a_prompt_becomes_its_ids(quiet_api: Api) -> None:
    found = tokenize(quiet_api, model="null", prompt="t5 t6 t7").json()
    assert found == {"max_model_len": CONTEXT, "count": 3, "tokens": [5, 6, 7], "token_strs": None}
    spelled = tokenize(quiet_api, prompt="t5 <eos>", return_token_strs=True).json()
    assert (spelled["tokens"], spelled["token_strs"]) == ([5, EOS_ID], ["t5", "<eos>"])


@pytest.mark.parametrize(
    ("path", "prompt"),
    [
        ("/v1/completions", {"prompt": "t1 t2 <eos> t3"}),
        ("/v1/completions", {"prompt": [9, 8, 7]}),
        ("/v1/chat/completions", {"messages": chat([1, 2], [3])}),
        ("/v1/chat/completions", {"messages": [{"role": "system", "content": [{"type": "text", "text": "t4"}]}]}),
    ],
)
def test_the_ids_are_those_that_a_worker_gets(
    quiet_api: Api, scripted: ScriptedWorker, path: str, prompt: dict[str, Any]
) -> None:
    client = Listener(quiet_api.url, path, {"model": "null", "max_tokens": 1, **prompt})
    claim = scripted.take()
    scripted.finish(claim, 0, [1], reason="length")
    client.end()
    assert tokenize(quiet_api, model="null", **prompt).json()["tokens"] == list(claim.spec.prompt_ids)


def test_an_empty_text_has_no_tokens_and_an_empty_list_no_text(quiet_api: Api) -> None:
    assert tokenize(quiet_api, prompt="").json()["count"] == 0
    assert detokenize(quiet_api, tokens=[]).json() == {"prompt": ""}


def test_ids_become_their_text_special_tokens_and_all(quiet_api: Api) -> None:
    assert detokenize(quiet_api, model="null", tokens=[1, EOS_ID, 2]).json() == {"prompt": "t1 <eos> t2"}


def test_long_texts_go_there_and_back(quiet_api: Api) -> None:
    text = words(n % WORDS for n in range(100_000))
    ids = tokenize(quiet_api, prompt=text).json()["tokens"]
    assert len(ids) == 100_000
    assert detokenize(quiet_api, tokens=ids).json()["prompt"] == text


@pytest.mark.parametrize(
    ("body", "param", "words_in_it"),
    [
        ({}, "prompt", "missing"),
        ({"prompt": 5}, "prompt", "5"),
        ({"prompt": None}, "prompt", "null"),
        ({"prompt": [5000]}, "prompt", "5000"),
        ({"prompt": ["t1", "t2"]}, "prompt", "one prompt"),
        ({"prompt": "t1", "add_special_tokens": "yes"}, "add_special_tokens", "true or false"),
        ({"prompt": "t1", "return_token_strs": 1}, "return_token_strs", "true or false"),
        ({"prompt": "t1", "temperature": 1}, "temperature", "not a parameter"),
        ({"messages": []}, "messages", "non-empty"),
        ({"messages": chat([1]), "prompt": "t1"}, "prompt", "not a parameter"),
        ({"messages": chat([1]), "add_special_tokens": True}, "add_special_tokens", "not implemented"),
        ({"messages": chat([1]), "tools": [{}]}, "tools", "not implemented"),
        ({"messages": chat([1]), "add_generation_prompt": 1}, "add_generation_prompt", "true or false"),
        ({"prompt": "t1", "model": 5}, "model", "string"),
    ],
)
def test_a_wrong_parameter_is_named(quiet_api: Api, body: dict[str, Any], param: str, words_in_it: str) -> None:
    error = error_of(tokenize(quiet_api, **body))
    assert error["param"] == param
    assert words_in_it in error["message"]


@pytest.mark.parametrize(
    ("body", "param", "words_in_it"),
    [
        ({}, "tokens", "missing"),
        ({"tokens": "t1"}, "tokens", "list"),
        ({"tokens": [1.5]}, "tokens[0]", "1.5"),
        ({"tokens": [-1]}, "tokens", "-1"),
        ({"tokens": [EOS_ID + 1]}, "tokens", str(EOS_ID + 1)),
        ({"tokens": [2**63]}, "tokens", str(2**63)),
        ({"tokens": [1], "prompt": "x"}, "prompt", "not a parameter"),
    ],
)
def test_wrong_ids_are_named(quiet_api: Api, body: dict[str, Any], param: str, words_in_it: str) -> None:
    error = error_of(detokenize(quiet_api, **body))
    assert error["param"] == param
    assert words_in_it in error["message"]


def test_another_model_is_a_404(quiet_api: Api) -> None:
    for answer in (tokenize(quiet_api, model="other", prompt="t1"), detokenize(quiet_api, model="other", tokens=[1])):
        assert error_of(answer, 404)["code"] == "model_not_found"


def test_a_model_tells_its_limits(quiet_api: Api, null_folder: Path) -> None:
    (listed,) = get(f"{quiet_api.url}/v1/models").json()["data"]
    assert listed == get(f"{quiet_api.url}/v1/models/null").json()
    assert (listed["id"], listed["object"], listed["owned_by"]) == ("null", "model", "prelay")
    assert listed["created"] == int((null_folder / "config.json").stat().st_mtime)  # whichever process is asked
    assert listed["max_model_len"] == CONTEXT
    limits = listed["limits"]
    assert limits["context_tokens"] == CONTEXT
    assert limits["vocabulary"] == EOS_ID + 1
    assert limits["choices"] == MAX_CHOICES
    assert limits["body_bytes"] == 8 * 1024 * 1024
    other = get(f"{quiet_api.url}/v1/models/other")
    assert error_of(other, 404)["code"] == "model_not_found"
