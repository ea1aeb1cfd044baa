"""A fault at every step of the protocol, in workers and in the API: each job still ends once and right, every client
hears the right tokens, and nothing is left behind. Faults of Redis are in test_matrix_redis.py, two faults at a time
in test_matrix_pairs.py.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from prelay_worker.config import Role
from tests.bed.servers import Server, binary_of, running
from tests.faults.matrix import ACTIONS, all_at_once, faults_of, run_api_case, run_worker_case

plain_and_divergent = pytest.mark.parametrize("divergent", [False, True], ids=["plain", "divergent"])
MODES = {False: "plain", True: "divergent"}
#: Unified workers run the code of the two others: the mode that shows more is enough for them.
ROLES_AND_MODES = [(role, mode) for role in Role for mode in MODES if mode or role is not Role.UNIFIED]
every_action = pytest.mark.parametrize("action", ACTIONS.values(), ids=ACTIONS)


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    for found in running("redis" if binary_of("redis") else "valkey"):
        found.client.config_set("appendfsync", "everysec")
        yield found


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize(("role", "divergent"), ROLES_AND_MODES, ids=lambda each: MODES.get(each, each))
@every_action
def test_a_fault_at_every_step_of_a_worker_changes_no_answer(
    server: Server, role: Role, action: str, divergent: bool
) -> None:
    all_at_once(run_worker_case, [(server, role, fault, divergent) for fault in faults_of(role, action)])


@pytest.mark.slow
@pytest.mark.timeout(400)
@plain_and_divergent
@every_action
def test_a_fault_at_every_step_of_the_api_changes_no_answer(server: Server, action: str, divergent: bool) -> None:
    all_at_once(run_api_case, [(server, fault, divergent) for fault in faults_of("api", action)])


@pytest.mark.timeout(200)
@pytest.mark.parametrize(
    ("role", "faults"),
    [
        (Role.PREFILL, ["handoff.before=die", "handoff=lost", "claim.after=die", "handoff.after=stop"]),
        (Role.DECODE, ["adopt.before=die", "emit.after=die", "copy.after=die", "preempt.after=die"]),
        (Role.DECODE, ["emit.before=stop@3", "claim.after=stop", "emit=lost@2", "finish.before=die"]),
        (Role.UNIFIED, ["claim.after=die", "adopt.before=die", "preempt.after=die", "emit.after=stop@3"]),
    ],
    ids=["prefill", "decode", "decode frozen", "unified"],
)
def test_faults_at_chosen_steps_of_a_worker_change_no_answer(server: Server, role: Role, faults: list[str]) -> None:
    all_at_once(run_worker_case, [(server, role, fault, True) for fault in faults])


@pytest.mark.timeout(200)
def test_faults_at_chosen_steps_of_the_api_change_no_answer(server: Server) -> None:
    faults = ["submit.after=die@4", "relay.requeue.before=die", "relay.requeue.after=stop", "requeue=lost", "view=lost"]
    all_at_once(run_api_case, [(server, fault, True) for fault in faults])
