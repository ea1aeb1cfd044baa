"""litellm, unchanged, with its provider `openai/`."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from tests.bed.chain import expected_chain
from tests.bed.forks import ROOT
from tests.bed.serving import Serving
from tests.bed.tokenizer import ids_of

from .conftest import client_environment, need

EXPECTED = expected_chain([11, 12], 30)


@pytest.fixture(scope="module")
def found(server: Serving) -> dict[str, Any]:
    """What each call of tests/conformance/litellm_calls.py gave."""
    need("litellm")
    command = [sys.executable, "-m", "tests.conformance.litellm_calls", server.url]
    done = subprocess.run(
        command, cwd=ROOT, env=client_environment(), capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout.splitlines()[-1]))


def test_a_completion_comes_whole_with_its_usage(found: dict[str, Any]) -> None:
    answer = found["completion"]
    assert [ids_of(choice["message"]["content"]) for choice in answer["choices"]] == [EXPECTED, EXPECTED]
    assert [choice["finish_reason"] for choice in answer["choices"]] == ["length", "length"]
    assert (answer["usage"]["prompt_tokens"], answer["usage"]["completion_tokens"]) == (2, 60)
    assert answer["id"].startswith("chatcmpl-")


def test_a_stream_says_the_same_and_ends_with_the_server_s_usage(found: dict[str, Any]) -> None:
    *chunks, last = found["streamed_completion"]
    assert ids_of("".join(chunk["choices"][0]["delta"]["content"] or "" for chunk in chunks)) == EXPECTED
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"
    assert (last["usage"]["prompt_tokens"], last["usage"]["completion_tokens"]) == (2, 30)
    assert ids_of(found["gathered_stream"]) == EXPECTED


def test_asynchronous_calls_go_on_side_by_side(found: dict[str, Any]) -> None:
    expected = [expected_chain([n], 30) for n in range(8)]
    assert [(ids_of(whole), ids_of(streamed)) for whole, streamed in found["acompletions"]] == [
        (ids, ids) for ids in expected
    ]


def test_a_text_completion_is_served_too(found: dict[str, Any]) -> None:
    (choice,) = found["text_completion"]["choices"]
    assert ids_of(choice["text"]) == EXPECTED


def test_parameters_arrive_and_logprobs_come_back(found: dict[str, Any]) -> None:
    (choice,) = found["parameters"]["choices"]
    assert ids_of(choice["message"]["content"]) == EXPECTED
    assert len(choice["logprobs"]["content"]) == len(EXPECTED)


@pytest.mark.parametrize(
    ("case", "kind", "status", "words"),
    [
        ("value", "BadRequestError", 400, "temperature must be a number from 0 to 2, not 3"),
        ("model", "NotFoundError", 404, "model 'other' is not served here"),
        ("context", "ContextWindowExceededError", 400, "max_tokens is 1000000"),
        ("tools", "BadRequestError", 400, "tools is not implemented"),
        ("streamed", "BadRequestError", 400, "temperature must be a number from 0 to 2, not 3"),
    ],
)
def test_errors_are_litellm_s_own_for_them(
    found: dict[str, Any], case: str, kind: str, status: int, words: str
) -> None:
    name, code, message = found["errors"][case]
    assert (name, code) == (kind, status), message
    assert words in message
