"""A worker is killed in mid-stream: the stream goes on, equal, within fifteen seconds."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from pathlib import Path

import pytest

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

#: Seconds in which a stream must go on, whoever was killed.
RECOVERY_S = 15.0
#: The same where the killed worker was the only one of its kind, and its successor must load the model first. On two
#: quiet cores that is about five seconds; a busy machine gets time, because nothing here is measured.
RELOAD_S = 90.0

Watch = Callable[[Answer], None]


def killing(server: Serving, role: str, after: int) -> tuple[list[float], Watch]:
    """A callback that kills the busy worker of `role` after so many tokens, and notes when text came after that."""
    times: list[float] = []

    def on_frame(answer: Answer) -> None:
        if times:
            times.append(time.monotonic())
        elif answer.cursors[-1][1] + 1 >= after:
            server.kill(role)
            times.append(time.monotonic())

    return times, on_frame


def longest(times: list[float]) -> float:
    return max(later - earlier for earlier, later in itertools.pairwise(times))


@pytest.mark.slow  # tests/integration/test_serve_nursery.py kills one of the real model, too
def test_a_killed_decode_worker_does_not_change_its_stream_and_another_goes_on(demo_model: Path) -> None:
    with serving("--served-model-name", "demo", "--decode", "2", model=demo_model) as server:
        undisturbed = stream(server.url, STORY)
        undisturbed.check()

        times, on_frame = killing(server, "decode", after=12)
        answer = stream(server.url, STORY, on_frame)

        answer.check()
        assert answer.text == undisturbed.text
        assert answer.usage == undisturbed.usage
        assert answer.epochs[-1] == 2
        assert longest(times) < RECOVERY_S, times
        server.until_ready()


@pytest.mark.slow
def test_killed_workers_that_were_the_only_ones_come_back_and_go_on(demo_model: Path) -> None:
    with serving("--served-model-name", "demo", model=demo_model) as server:
        undisturbed = stream(server.url, STORY)

        times, on_frame = killing(server, "decode", after=12)
        answer = stream(server.url, STORY, on_frame)
        answer.check()
        assert answer.text == undisturbed.text
        assert longest(times) < RELOAD_S, times

        # Prefill dies while decode streams: nothing is lost, and the next request is served when it is back.
        server.until_ready()
        times, on_frame = killing(server, "prefill", after=12)
        answer = stream(server.url, STORY, on_frame)
        answer.check()
        assert answer.text == undisturbed.text
        assert answer.epochs[-1] == 1
        assert longest(times) < RECOVERY_S, times
        server.until_ready()
        assert stream(server.url, STORY).text == undisturbed.text
        server.until_drained()
        assert not server.left_segments(), "the dead worker's segment is still there"
