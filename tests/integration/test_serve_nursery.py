"""`prelay serve` with the demo model: its workers are forks of the nursery, and what is killed comes back."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.bed.http import post
from tests.bed.serving import Serving, serving
from tests.integration.serve_process import is_gone, until

pytestmark = [pytest.mark.model, pytest.mark.timeout(240)]

#: From a worker's death until another one serves in its place, in seconds: four on two quiet cores. Not measured here.
RESTART_S = 60.0


@pytest.fixture(scope="module")
def fleet(demo_model: Path) -> Iterator[Serving]:
    with serving("--served-model-name", "demo", "--max-model-len", "512", "--threads", "2", model=demo_model) as server:
        yield server
        processes = psutil.Process(server.process.pid).children(recursive=True)
        assert len(processes) == 5  # server, API, nursery, two workers
    assert all(is_gone(process) for process in processes)


def named(fleet: Serving) -> dict[str, psutil.Process]:
    """The processes of the fleet that have a name of their own, by it."""
    processes = psutil.Process(fleet.process.pid).children(recursive=True)
    return {process.name(): process for process in processes if process.name().startswith("prelay-")}


def is_whole(fleet: Serving, gone: set[int]) -> bool:
    """True when both roles are ready and none of them is one of `gone`."""
    ready = {worker["role"]: worker["pid"] for worker in fleet.workers() if worker["state"] == "ready"}
    return set(ready) == {"prefill", "decode"} and not gone & set(ready.values())


def check_answers(fleet: Serving) -> None:
    body = {"model": "demo", "prompt": "One, two,", "max_tokens": 4, "temperature": 0}
    answer = post(f"{fleet.url}/v1/completions", json=body, timeout=60).raise_for_status().json()
    assert answer["usage"]["completion_tokens"] == 4


def test_workers_are_forks_of_the_nursery_and_it_runs_one_thread(fleet: Serving) -> None:
    found = named(fleet)
    assert set(found) == {"prelay-nursery", "prelay-prefill", "prelay-decode"}
    nursery = found["prelay-nursery"]
    assert set(nursery.children()) == {found["prelay-prefill"], found["prelay-decode"]}
    assert nursery.num_threads() == 1
    assert {worker["pid"] for worker in fleet.workers()} == {process.pid for process in nursery.children()}
    assert "plain process" not in fleet.log
    check_answers(fleet)


@pytest.mark.parametrize("role", ["decode", pytest.param("prefill", marks=pytest.mark.slow)])
def test_a_killed_worker_is_back_soon_from_the_same_nursery(fleet: Serving, role: str) -> None:
    nursery = named(fleet)["prelay-nursery"]
    killed = fleet.kill(role)
    until(lambda: is_whole(fleet, {killed}), f"another {role} worker serves", RESTART_S, lambda: fleet.log)
    assert f"{role}-0 │ ended with signal SIGKILL; starts again in 0.2 s" in fleet.log
    assert named(fleet)["prelay-nursery"] == nursery
    assert named(fleet)[f"prelay-{role}"].ppid() == nursery.pid
    check_answers(fleet)


@pytest.mark.slow
def test_a_killed_nursery_ends_its_workers_and_all_three_come_back(fleet: Serving) -> None:
    before = named(fleet)
    os.kill(before["prelay-nursery"].pid, signal.SIGKILL)
    gone = {process.pid for process in before.values()}
    until(lambda: is_whole(fleet, gone), "other workers serve", 90, lambda: fleet.log)
    assert all(is_gone(process) for process in before.values())
    after = named(fleet)
    assert {process.ppid() for name, process in after.items() if name != "prelay-nursery"} == {
        after["prelay-nursery"].pid
    }
    assert "plain process" not in fleet.log
    check_answers(fleet)
