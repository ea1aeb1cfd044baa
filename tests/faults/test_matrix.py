"""A fault at every step of the workers' protocol: each job still ends once and right, and nothing is left behind."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import orjson
import pytest

from prelay_queue.scripts import text
from prelay_worker.config import NullModel, Role
from tests.bed.processes import until
from tests.bed.servers import Server, binary_of, running
from tests.faults.fleet import TIMES, NullFleet, WorkerProcess, null_fleet

#: Fleets that run at the same time on one server.
AT_ONCE = 6
SCRIPTS = {
    Role.PREFILL: ("claim", "handoff", "finish", "preempt", "renew", "reap", "beat", "tidy"),
    Role.DECODE: ("claim", "adopt", "emit", "finish", "preempt", "renew", "reap", "beat", "tidy"),
}
#: Points that are no script.
OTHERS = {
    Role.PREFILL: ("writer.before", "writer.after"),
    Role.DECODE: ("writer.before", "writer.after", "copy.before", "copy.after"),
}
#: A thread that sleeps for more than a lease, while the others of its process go on.
PAUSE = f"pause:{TIMES.lease_ms / 1000 + 0.5}"
NULL = NullModel(step_ms=8)


def faults_of(role: Role, action: str) -> list[str]:
    if action == "lost":
        return [f"{script}=lost" for script in SCRIPTS[role]]
    points = [f"{script}.{when}" for script in SCRIPTS[role] for when in ("before", "after")]
    return [f"{point}={action}" for point in (*points, *OTHERS[role])]


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    for found in running("redis" if binary_of("redis") else "valkey"):
        found.client.config_set("appendfsync", "everysec")
        yield found


def evict_everything(fleet: NullFleet, worker: WorkerProcess) -> None:
    """Ask a worker, as an operator does, to give up what it holds."""
    for client in fleet.clients:
        owner = text(fleet.redis.hget(fleet.keys.job(client.id), "ow") or "")
        if owner and owner == worker.id:
            command = orjson.dumps({"op": "preempt", "id": client.id, "ep": 0})
            fleet.redis.xadd(fleet.keys.control(owner), {"c": command})


def run_case(server: Server, role: Role, fault: str, divergent: bool) -> None:
    """1 the worker that will fail has the field to itself, 2 its fault happens, 3 the others come, 4 all ends well."""
    point = fault.partition("=")[0]
    step_ms = 25 if point.startswith("renew") else NULL.step_ms  # long enough to be renewed
    with null_fleet(server, null=replace(NULL, divergent=divergent, step_ms=step_ms)) as fleet:
        if role is Role.DECODE:
            fleet.start(Role.PREFILL)
        failing = fleet.start(role, fault, blocks=22)
        fleet.submit(5, max_tokens=32)
        fleet.submit(1, max_tokens=1)  # one that a prefill worker ends

        def struck() -> bool:
            if point.startswith("preempt"):  # do not wait for the pool to be full at the right time
                evict_everything(fleet, failing)
            return failing.struck(point)

        until(struck, 20)
        fleet.start(role)
        if role is Role.PREFILL:
            fleet.start(Role.DECODE, blocks=22)
        fleet.finish(60)
        if fault.endswith("die"):
            assert failing in fleet.ended


def run_cases(server: Server, role: Role, faults: list[str], divergent: bool) -> None:
    with ThreadPoolExecutor(AT_ONCE) as pool:
        running_cases = {fault: pool.submit(run_case, server, role, fault, divergent) for fault in faults}
    failed = {fault: str(case.exception()) for fault, case in running_cases.items() if case.exception() is not None}
    report = "\n\n".join(f"=== {role} {fault}\n{error}" for fault, error in failed.items())
    assert not failed, f"{sorted(failed)}\n{report}"


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("divergent", [False, True], ids=["plain", "divergent"])
@pytest.mark.parametrize("action", ["die", "stop", PAUSE, "lost"], ids=["die", "freeze", "pause", "lost"])
@pytest.mark.parametrize("role", [Role.PREFILL, Role.DECODE])
def test_a_fault_at_every_step_changes_no_answer(server: Server, role: Role, action: str, divergent: bool) -> None:
    run_cases(server, role, faults_of(role, action), divergent)


@pytest.mark.timeout(200)
@pytest.mark.parametrize(
    ("role", "faults"),
    [
        (Role.PREFILL, ["handoff.before=die", "handoff=lost", "claim.after=die", "handoff.after=stop"]),
        (Role.DECODE, ["adopt.before=die", "emit.after=die", "copy.after=die", "preempt.after=die"]),
        (Role.DECODE, ["emit.before=stop@3", "claim.after=stop", "emit=lost@2", "finish.before=die"]),
    ],
    ids=["prefill", "decode", "decode frozen"],
)
def test_faults_at_chosen_steps_change_no_answer(server: Server, role: Role, faults: list[str]) -> None:
    run_cases(server, role, faults, divergent=True)


@pytest.mark.parametrize(
    ("prefill", "decode"),
    [
        ("handoff.after=die", "adopt.before=die"),
        pytest.param("claim.after=die@2", "emit.after=die@4", marks=pytest.mark.slow),
    ],
    ids=["around the hand-over", "at work"],
)
def test_both_sides_dying_change_no_answer(server: Server, prefill: str, decode: str) -> None:
    with null_fleet(server, null=replace(NULL, divergent=True)) as fleet:
        fleet.start(Role.PREFILL, prefill)
        fleet.start(Role.DECODE, decode, blocks=22)
        fleet.submit(6, max_tokens=32)
        fleet.finish(60)
        assert sorted(worker.role for worker in fleet.ended) == [Role.DECODE, Role.PREFILL]
