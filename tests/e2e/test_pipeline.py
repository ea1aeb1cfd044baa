"""The real model through the whole pipeline: what a user gets, and how it came about."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from openai import OpenAI

from tests.bed.http import post
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
    whole = post(f"{plain.url}/v1/chat/completions", json=CHAT, timeout=60).json()

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
    response = post(f"{plain.url}/v1/completions", json={**STORY, "max_tokens": 2}, timeout=60)

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
    answer = stream(plain.url, {**STORY, "prompt": "A long prompt. " * 20})
    usage = answer.usage
    assert usage is not None
    # The first token comes from prefill; each further one is one position on decode, and the last is never fed.
    decoded = usage["completion_tokens"] - 1

    plain.until_drained()
    assert computed("decode") - before["decode"] == decoded
    assert computed("prefill") - before["prefill"] == usage["prompt_tokens"] - answer.cached


def test_of_a_chat_that_begins_like_another_only_the_rest_is_computed(plain: Serving) -> None:
    """By whole blocks of 16 tokens, and never all of it."""

    def chat(question: str) -> dict[str, object]:
        rules = {"role": "system", "content": "You are the keeper of a lighthouse. Answer in one sentence. " * 4}
        return {**CHAT, "messages": [rules, {"role": "user", "content": question}]}

    plain.until_drained()
    first = stream(plain.url, chat("What do you see at night?"))
    plain.until_drained()
    before = plain.heard_anew("prefill")
    second = stream(plain.url, chat("Who brings the oil?"))
    plain.until_drained()
    after = plain.heard_anew("prefill")

    assert first.usage is not None
    assert second.usage is not None
    prompt = second.usage["prompt_tokens"]
    assert 40 < second.cached < prompt
    assert second.cached % 16 == 0
    assert after["computed_tokens"] - before["computed_tokens"] == prompt - second.cached
    assert after["prefix_hits"] - before["prefix_hits"] == second.cached
    assert after["prefix_queries"] - before["prefix_queries"] == prompt
    assert after["kv"]["cached"] >= second.cached // 16

    again = stream(plain.url, chat("Who brings the oil?"))
    assert second.cached < again.cached < prompt
    assert (again.text, again.usage) == (second.text, second.usage)


def test_kv_reaches_decode_only_through_the_mapped_segment(plain: Serving) -> None:
    body = {**STORY, "prompt": "The history of the lighthouse begins with"}
    undisturbed = stream(plain.url, body)
    decode = plain.workers("decode")[0]["pid"]
    mapped = [line for line in Path(f"/proc/{decode}/maps").read_text().splitlines() if "/dev/shm/prelay-" in line]
    assert mapped, "the decode worker maps no segment"
    assert all(line.split()[1].startswith("r--") for line in mapped), mapped

    # Spoil the keys in the segment while the job is staged: what decode says must change, and only after seq 0.
    # It is put back after: prompts that begin alike would find it.
    segment = Path(mapped[0].split()[-1])
    saved: dict[int, bytes] = {}
    os.kill(decode, signal.SIGSTOP)
    try:
        spoiled = False

        def spoil(_: object) -> None:
            nonlocal spoiled
            if not spoiled:
                saved.update(_zero_blocks(segment))
                spoiled = True
                os.kill(decode, signal.SIGCONT)

        answer = stream(plain.url, body, spoil)
    finally:
        os.kill(decode, signal.SIGCONT)
        _write(segment, saved)
    assert spoiled
    answer.check()
    assert answer.text != undisturbed.text
    assert answer.text[:4] == undisturbed.text[:4]
    assert stream(plain.url, body).text == undisturbed.text


def _zero_blocks(segment: Path) -> dict[int, bytes]:
    """Overwrite all keys and values, and return them by their places in the file; its first pages stay: the header
    and the generation table."""
    saved, offset, size = {}, 1 << 16, 1 << 20
    with segment.open("rb") as file:
        file.seek(offset)
        while piece := file.read(size):
            if piece.count(0) < len(piece):
                saved[offset] = piece
            offset += len(piece)
    _write(segment, {place: bytes(len(piece)) for place, piece in saved.items()})
    return saved


def _write(segment: Path, pieces: dict[int, bytes]) -> None:
    with segment.open("r+b") as file:
        for place, piece in pieces.items():
            file.seek(place)
            file.write(piece)


def test_pools_are_empty_when_nothing_runs(plain: Serving) -> None:
    plain.until_drained()
