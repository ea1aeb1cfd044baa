"""The real model through the whole pipeline: what a user gets, and how it came about."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import httpx
import pytest
from openai import OpenAI

from tests.bed.serving import Serving

from .client import counted, stream

pytestmark = [pytest.mark.model, pytest.mark.timeout(180)]

CHAT = {
    "model": "demo",
    "messages": [{"role": "user", "content": "What is the capital of France?"}],
    "temperature": 0,
    "max_tokens": 24,
}
STORY = {"model": "demo", "prompt": "Once upon a time", "temperature": 0, "max_tokens": 40, "ignore_eos": True}


def test_a_chat_streams_the_answer_that_the_whole_response_has(plain: Serving) -> None:
    streamed = stream(plain.url, CHAT)
    whole = httpx.post(f"{plain.url}/v1/chat/completions", json=CHAT, timeout=60).json()

    streamed.check()
    assert "Paris" in streamed.text
    assert whole["choices"][0]["message"]["content"] == streamed.text
    assert whole["choices"][0]["finish_reason"] == streamed.finish[0]
    assert counted(whole["usage"]) == streamed.usage


def test_the_official_client_streams_and_completes(plain: Serving) -> None:
    client = OpenAI(base_url=f"{plain.url}/v1", api_key="none")
    chunks = list(client.chat.completions.create(**CHAT, stream=True))  # type: ignore[call-overload]
    whole = client.chat.completions.create(**CHAT)  # type: ignore[call-overload]

    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == whole.choices[0].message.content
    assert chunks[0].choices[0].delta.role == "assistant"
    client.close()


def test_the_request_id_is_the_header_and_the_body_id(plain: Serving) -> None:
    response = httpx.post(f"{plain.url}/v1/completions", json={**STORY, "max_tokens": 2}, timeout=60)

    assert response.headers["x-request-id"] == response.json()["id"]


def test_prefill_and_decode_are_processes_of_their_own(plain: Serving) -> None:
    pids = {worker["role"]: worker["pid"] for worker in plain.workers()}

    assert pids.keys() == {"prefill", "decode"}
    assert pids["prefill"] != pids["decode"]


def test_decode_runs_one_position_a_token_and_never_the_prompt(plain: Serving) -> None:
    def computed(role: str) -> int:
        return int(plain.heard_anew(role)["computed_tokens"])

    plain.until_drained()
    before = {role: computed(role) for role in ("prefill", "decode")}
    usage = stream(plain.url, {**STORY, "prompt": "A long prompt. " * 20}).usage
    assert usage is not None
    # The first token comes from prefill; each further one is one position on decode, and the last is never fed.
    decoded = usage["completion_tokens"] - 1

    plain.until_drained()
    assert computed("decode") - before["decode"] == decoded
    assert computed("prefill") - before["prefill"] == usage["prompt_tokens"]


def test_kv_reaches_decode_only_through_the_mapped_segment(plain: Serving) -> None:
    body = {**STORY, "prompt": "The history of the lighthouse begins with"}
    undisturbed = stream(plain.url, body)
    decode = plain.workers("decode")[0]["pid"]
    mapped = [line for line in Path(f"/proc/{decode}/maps").read_text().splitlines() if "/dev/shm/prelay-" in line]
    assert mapped, "the decode worker maps no segment"
    assert all(line.split()[1].startswith("r--") for line in mapped), mapped

    # Spoil the keys in the segment while the job is staged: what decode says must change, and only after seq 0.
    segment = Path(mapped[0].split()[-1])
    os.kill(decode, signal.SIGSTOP)
    try:
        spoiled = False

        def spoil(_: object) -> None:
            nonlocal spoiled
            if not spoiled:
                _zero_blocks(segment)
                spoiled = True
                os.kill(decode, signal.SIGCONT)

        answer = stream(plain.url, body, spoil)
    finally:
        os.kill(decode, signal.SIGCONT)
    assert spoiled
    answer.check()
    assert answer.text != undisturbed.text
    assert answer.text[:4] == undisturbed.text[:4]
    assert stream(plain.url, body).text == undisturbed.text


def _zero_blocks(segment: Path) -> None:
    """Overwrite nearly all keys and values; the header and the generation table, in the first pages, stay."""
    first = 1 << 16
    with segment.open("r+b") as file:
        file.seek(first)
        file.write(bytes(segment.stat().st_size - first))


def test_pools_are_empty_when_nothing_runs(plain: Serving) -> None:
    plain.until_drained()
