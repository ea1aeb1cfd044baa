"""What the random histories share: their server, and how many of how many steps are tried."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, run_state_machine_as_test

from tests.bed.servers import Server, binary_of, running


@pytest.fixture(scope="module")
def machine_server() -> Iterator[Server]:
    for server in running("redis" if binary_of("redis") else "valkey"):
        server.client.config_set("appendonly", "no")
        yield server


def run_machine(machine: type[RuleBasedStateMachine], server: Server, *, examples: int, steps: int) -> None:
    """Try so many histories of up to so many steps on the server, which the machine finds as `server`."""
    machine.server = server
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps,
            deadline=None,
            suppress_health_check=list(HealthCheck),
            print_blob=True,
        ),
    )
