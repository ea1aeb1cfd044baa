"""A worker is killed in mid-stream: the stream goes on, equal, within fifteen seconds."""

from __future__ import annotations

import itertools
import time
from pathlib import Path

import pytest

from prelay_kv.shm import sweep
from tests.bed.serving import Serving, serving

from .client import Answer, stream

pytestmark = [pytest.mark.model, pytest.mark.timeout(240)]

STORY = {
    "model": "demo",
    "prompt": "The old lighthouse keeper said",
    "temperature": 0,
    "max_tokens": 48,
    "ignore_eos": True,
}

#: Seconds: lease (10), sweep (1), and the time of a fresh prefill.
RECOVERY_S = 15.0


def killing(server: Serving, role: str, after: int) -> tuple[list[float], object]:
    """A callback that kills the worker of `role` after so many tokens, and notes when text came after that."""
    times: list[float] = []

    def on_frame(answer: Answer) -> None:
        if times:
            times.append(time.monotonic())
        elif answer.cursors[-1][1] + 1 >= after:
            server.kill(role)
            times.append(time.monotonic())

    return times, on_frame


@pytest.fixture
def server(demo_model: Path) -> object:
    with serving("--served-model-name", "demo", model=demo_model) as running:
        yield running


def test_killed_workers_do_not_change_a_stream(server: Serving) -> None:
    undisturbed = stream(server.url, STORY)
    undisturbed.check()

    # Decode dies: its job is reaped, prefilled again with what stands, and decoded by the worker that comes back.
    times, on_frame = killing(server, "decode", after=12)
    answer = stream(server.url, STORY, on_frame)  # type: ignore[arg-type]
    answer.check()
    assert answer.text == undisturbed.text
    assert answer.usage == undisturbed.usage
    assert len(answer.epochs) == 2
    gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
    assert max(gaps) < RECOVERY_S, gaps

    # Prefill dies while decode streams: nothing is lost, and the next request is served when it is back.
    server.until_ready()
    _, on_frame = killing(server, "prefill", after=12)
    answer = stream(server.url, STORY, on_frame)  # type: ignore[arg-type]
    answer.check()
    assert answer.text == undisturbed.text
    server.until_ready()
    assert stream(server.url, STORY).text == undisturbed.text
    server.until_drained()
    assert not sweep(), "the dead worker's segment is still there"
