"""A prefilled job whose domain has no decode worker any more goes back to step 1, if somebody else can run it."""

from __future__ import annotations

import pytest

from prelay_queue.events import RequeuedEvent
from prelay_queue.scripts import Held
from prelay_queue.state import State
from tests.integration.queue_desk import API, DOMAIN, JOB, LEASE_MS, P1, Desk, ServerDesk

NOW, NEVER = -1, 10**9  # how long it must have waited, ms


def live(desk: Desk, name: str, role: str, domain: str = DOMAIN, state: str = "ready") -> None:
    desk.run(desk.scripts.beat(name, {"role": role, "domain": domain, "state": state}, 15_000))


def renew(desk: Desk, stranded_ms: int = NOW) -> str:
    (answer,) = desk.run(desk.scripts.renew(P1, LEASE_MS, [Held(JOB, 1, "export")], stranded_ms))
    return answer


ELSEWHERE = [
    pytest.param([("unified:1:a", "unified", DOMAIN)], id="a unified worker"),
    pytest.param([("prefill:9:a", "prefill", "there"), ("decode:9:a", "decode", "there")], id="another domain"),
]


@pytest.mark.parametrize("others", ELSEWHERE)
def test_a_staged_job_that_nobody_here_can_take_goes_back_to_step_one(
    desk: Desk, others: list[tuple[str, str, str]]
) -> None:
    desk.to(State.STAGED)
    desk.listen(API)
    live(desk, P1, "prefill")
    for name, role, domain in others:
        live(desk, name, role, domain)
    assert renew(desk, NEVER) == "hold"
    assert renew(desk) == "release"
    assert desk.heard() == [RequeuedEvent(JOB, 2, 1)]
    assert (desk.fields()["st"], desk.fields()["ep"], desk.view().ids) == (State.QUEUED, "2", (7,))
    assert renew(desk) == "release"


def test_a_waiting_job_is_left_to_the_decode_worker_that_lives(desk: Desk) -> None:
    desk.to(State.STAGED)
    live(desk, "unified:1:a", "unified")
    live(desk, "decode:1:a", "decode")
    assert renew(desk) == "hold"


def test_a_decode_worker_that_drains_takes_nothing(desk: Desk) -> None:
    desk.to(State.STAGED)
    live(desk, "unified:1:a", "unified")
    live(desk, "decode:1:a", "decode", state="draining")
    assert renew(desk) == "release"


@pytest.mark.parametrize(
    "others", [[], [("prefill:9:a", "prefill", "there")], [("decode:9:a", "decode", "there")]], ids=str
)
def test_a_staged_job_waits_when_nobody_else_could_run_it_either(
    desk: Desk, others: list[tuple[str, str, str]]
) -> None:
    desk.to(State.STAGED)
    live(desk, P1, "prefill")
    for name, role, domain in others:
        live(desk, name, role, domain)
    assert renew(desk) == "hold"


def test_a_job_that_is_being_copied_is_nobodys_to_take_back(desk: Desk) -> None:
    desk.to(State.ADOPTING)
    live(desk, "unified:1:a", "unified")
    assert renew(desk) == "hold"
    assert desk.fields()["st"] == State.ADOPTING


def test_a_worker_that_says_less_than_we_expect_costs_nobody_a_lease(desk: Desk) -> None:
    """It may be of another version."""
    desk.to(State.STAGED)
    desk.run(desk.scripts.beat("decode:9:a", {"domain": DOMAIN}, 15_000))
    assert renew(desk) == "hold"


@pytest.mark.parametrize("said", [b"no json", b"5", b"[]", b"null"])
def test_a_heartbeat_that_cannot_be_read_costs_nobody_a_lease(server_desk: ServerDesk, said: bytes) -> None:
    server_desk.to(State.STAGED)
    live(server_desk, "decode:9:a", "decode")
    server_desk.redis.set(server_desk.keys.worker("decode:9:a"), said)
    live(server_desk, "unified:1:a", "unified")
    assert renew(server_desk) == "release"
