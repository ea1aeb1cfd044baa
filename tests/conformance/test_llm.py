"""The command `llm`, unchanged, with our server in its extra-openai-models.yaml."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.bed.chain import expected_chain
from tests.bed.serving import Serving
from tests.bed.tokenizer import ids_of, words

from .conftest import client_environment, need

PROMPT, TOKENS = [11, 12], 30
EXPECTED = expected_chain(PROMPT, TOKENS)
MODELS = """
- model_id: sea
  model_name: "null"
  api_base: "{url}/v1"
- model_id: sea-text
  model_name: "null"
  api_base: "{url}/v1"
  completion: true
"""
Llm = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def llm(server: Serving, tmp_path: Path) -> Llm:
    """Runs the command with these arguments; what it keeps is in a folder of the test's own."""
    need("llm")
    (tmp_path / "extra-openai-models.yaml").write_text(MODELS.format(url=server.url))
    environment = client_environment(LLM_USER_PATH=str(tmp_path))

    def run(*arguments: str, said: str = "") -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "llm", *arguments]
        return subprocess.run(
            command, env=environment, input=said, capture_output=True, text=True, timeout=60, check=False
        )

    return run


def answer_to(done: subprocess.CompletedProcess[str]) -> list[int]:
    assert done.returncode == 0, done.stderr
    return ids_of(done.stdout)


@pytest.mark.parametrize("how", [("-m", "sea"), ("-m", "sea", "--no-stream"), ("-m", "sea-text")], ids=" ".join)
def test_a_prompt_is_answered(llm: Llm, how: tuple[str, ...]) -> None:
    assert answer_to(llm(*how, "-o", "max_tokens", str(TOKENS), words(PROMPT))) == EXPECTED


def test_options_arrive_and_the_log_has_the_server_s_usage(llm: Llm) -> None:
    options = {"max_tokens": TOKENS, "temperature": 1.5, "top_p": 0.5, "seed": 3, "frequency_penalty": 1}
    given = [word for name, value in options.items() for word in ("-o", name, str(value))]
    assert answer_to(llm("-m", "sea", *given, "-s", words(PROMPT[:1]), words(PROMPT[1:]))) == EXPECTED
    (entry,) = json.loads(llm("logs", "--json", "-n", "1").stdout)
    assert (entry["input_tokens"], entry["output_tokens"]) == (len(PROMPT), TOKENS)
    assert entry["response_json"]["finish_reason"] == "length"


def test_a_conversation_goes_on_with_what_was_said(llm: Llm) -> None:
    first = answer_to(llm("-m", "sea", "-o", "max_tokens", "3", words([5])))
    second = answer_to(llm("-c", "-o", "max_tokens", "3", words([6])))
    assert first == expected_chain([5], 3)
    assert second == expected_chain([5, *first, 6], 3)


def test_a_chat_in_the_terminal_is_a_conversation(llm: Llm) -> None:
    done = llm("chat", "-m", "sea", "-o", "max_tokens", "3", said=f"{words([5])}\n{words([6])}\nquit\n")
    first = expected_chain([5], 3)
    assert answer_to(done) == [*first, *expected_chain([5, *first, 6], 3)]


def test_what_the_server_refuses_is_said(llm: Llm) -> None:
    done = llm("-m", "sea", "-o", "max_tokens", "100000", words(PROMPT))
    assert done.returncode == 1
    assert "max_tokens is 100000 and messages has 2 tokens" in done.stderr
