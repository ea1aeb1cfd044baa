"""`prelay batch run` on the demo model."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from tests.bed.serving import serving

QUESTIONS = [
    "What is the capital of France?",
    "Name three colours.",
    "Is water wet?",
    "Count from one to five.",
    "What do bees make?",
]
TOKENS = 12

pytestmark = [pytest.mark.slow, pytest.mark.model, pytest.mark.timeout(300)]


def test_five_prompts_are_answered_as_the_chat_route_answers_them(demo_model: Path, tmp_path: Path) -> None:
    given, output = tmp_path / "questions.txt", tmp_path / "out.jsonl"
    given.write_text("\n".join(QUESTIONS))
    options = ("--text", "--chat", "--max-tokens", str(TOKENS), "--temperature", "0", "--ordered")
    with serving("--batch", "1", model=demo_model) as server:
        done = subprocess.run(
            [sys.executable, "-m", "prelay", "batch", "run", given, "-o", output, *options, "--url", server.url],
            env={**os.environ}, capture_output=True, text=True, timeout=200, check=False,
        )  # fmt: skip
        assert done.returncode == 0, f"{done.stderr}\n{server.log}"
        model = httpx.get(f"{server.url}/v1/models").json()["data"][0]["id"]
        said = []
        for question in QUESTIONS:
            body = {"model": model, "messages": [{"role": "user", "content": question}]}
            body |= {"max_tokens": TOKENS, "temperature": 0}
            answer = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=100)
            assert answer.status_code == 200, answer.text
            said.append(answer.json()["choices"])
    rows = [json.loads(line) for line in output.read_text().splitlines()]
    assert [row["custom_id"] for row in rows] == [f"line-{number}" for number in range(1, 6)]
    assert [row["response"]["body"]["choices"] for row in rows] == said
