"""Failpoints strike at the hit they name and at no other."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from prelay_queue import failpoints
from prelay_queue.errors import QueueUnavailable


@pytest.fixture(autouse=True)
def disarmed() -> Iterator[None]:
    yield
    failpoints.arm("")


def test_a_fault_is_parsed_with_its_action_time_and_hit() -> None:
    faults = failpoints.parse("handoff.after=die, relay.deliver=pause:0.25@*, emit=lost@3")
    assert set(faults) == {"handoff.after", "relay.deliver", "emit"}
    assert faults["handoff.after"] == failpoints.Fault("die", 0.0, 1)
    assert faults["relay.deliver"] == failpoints.Fault("pause", 0.25, 0)
    assert faults["emit"] == failpoints.Fault("lost", 0.0, 3)


@pytest.mark.parametrize("words", ["", " , ,", "  "])
def test_no_words_arm_nothing(words: str) -> None:
    assert failpoints.parse(words) == {}


@pytest.mark.parametrize(
    "bad", ["x", "x=", "x=explode", "x=pause:soon", "x=die@first", "x=die@-1", "x=die@0", "=die", "x=pause:-1"]
)
def test_a_fault_that_does_not_parse_is_named_in_the_error(bad: str) -> None:
    with pytest.raises(ValueError) as caught:
        failpoints.parse(f"ok=die, {bad}")
    assert "PRELAY_FAULTS" in str(caught.value)
    assert repr(bad) in str(caught.value)


def test_cut_raises_at_the_hit_it_names_and_once() -> None:
    failpoints.arm("p=cut@3")
    failpoints.hit("p")
    failpoints.hit("other")
    failpoints.hit("p")
    with pytest.raises(QueueUnavailable):
        failpoints.hit("p")
    failpoints.hit("p")


def test_a_star_strikes_at_every_hit() -> None:
    failpoints.arm("p=cut@*")
    for _ in range(3):
        with pytest.raises(QueueUnavailable):
            failpoints.hit("p")


def test_pause_holds_the_thread_for_its_time() -> None:
    failpoints.arm("p=pause:0.05")
    started = time.monotonic()
    failpoints.hit("p")
    assert time.monotonic() - started >= 0.05


async def test_pause_in_a_coroutine_lets_others_run() -> None:
    failpoints.arm("p=pause:0.05")
    order: list[str] = []

    async def paused() -> None:
        await failpoints.ahit("p")
        order.append("paused")

    async def other() -> None:
        order.append("other")

    await asyncio.gather(paused(), other())
    assert order == ["other", "paused"]


async def test_cut_raises_in_a_coroutine_too() -> None:
    failpoints.arm("p=cut")
    with pytest.raises(QueueUnavailable):
        await failpoints.ahit("p")


def test_a_lost_reply_is_lost_at_its_hit_only() -> None:
    failpoints.arm("emit=lost@2")
    assert [failpoints.loses_reply("emit") for _ in range(3)] == [False, True, False]
    assert not failpoints.loses_reply("finish")


def test_nothing_is_armed_without_the_environment() -> None:
    failpoints.arm("")
    assert not failpoints.armed()
    failpoints.hit("anything")


#: A process that passes the point `p` twice.
CODE = (
    "from prelay_queue import failpoints\n"
    "failpoints.hit('p'); print('once', flush=True); failpoints.hit('p'); print('twice', flush=True)"
)


def start(faults: str) -> subprocess.Popen[bytes]:
    environment = {**os.environ, "PRELAY_FAULTS": faults}
    return subprocess.Popen([sys.executable, "-c", CODE], env=environment, stdout=subprocess.PIPE)


def test_die_kills_the_process_with_sigkill_at_the_point() -> None:
    process = start("p=die@2")
    said, _ = process.communicate(timeout=20)
    assert (process.returncode, said) == (-signal.SIGKILL, b"once\n")


def test_stop_freezes_the_whole_process_until_it_is_continued() -> None:
    process = start("p=stop@2")
    _, status = os.waitpid(process.pid, os.WUNTRACED)
    assert os.WIFSTOPPED(status)
    process.send_signal(signal.SIGCONT)
    said, _ = process.communicate(timeout=20)
    assert (process.returncode, said) == (0, b"once\ntwice\n")
