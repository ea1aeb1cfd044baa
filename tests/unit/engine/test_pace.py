"""What a batch may have of each step: the rules of `pace` one by one, and on machines of any speed."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prelay_engine.pace import LEAST_EVERY_S, LEAST_ROWS, LEAST_TOKENS, MOST_ABANDONED, SHARE, Line, Pace
from prelay_engine.scheduler import Chunk, Limits, Plan, Row, schedule

URGENT, BATCH = 0, 2
MOST, TARGET_MS = 256, 200.0


def rows(count: int, priority: int, todo: int = 0) -> list[Row]:
    return [Row(f"{priority}-{todo}-{number}", priority, number, False, todo, 0, 1) for number in range(count)]


@dataclass
class Machine:
    """A step costs `fixed_ms`, and more for each decoding row and each token of a prompt. Its clock is the time."""

    fixed_ms: float
    row_ms: float
    token_ms: float
    now_ms: float = 0.0
    pace: Pace = field(init=False)

    def __post_init__(self) -> None:
        self.pace = Pace(MOST, TARGET_MS, lambda: self.now_ms / 1000)

    def step(self, running: list[Row]) -> tuple[Plan, float]:
        limits = self.pace.limits(running)
        assert (limits.batch_tokens or 0) >= 0
        plan = schedule(running, 0, limits)
        took_ms = self.cost(len(plan.decode), sum(chunk.tokens for chunk in plan.chunks))
        self.now_ms += took_ms
        self.pace.ran(running, plan, took_ms)
        return plan, took_ms

    def cost(self, decoding: int, tokens: int) -> float:
        return self.fixed_ms + self.row_ms * decoding + self.token_ms * tokens


MACHINES = st.builds(Machine, st.floats(1, 300), st.floats(0.01, 20), st.floats(0.01, 20))


def batch_of(plan: Plan) -> tuple[int, int]:
    """Its decoding rows and the tokens of its prompts."""
    decoding = sum(key.startswith(f"{BATCH}-") for key in plan.decode)
    return decoding, sum(chunk.tokens for chunk in plan.chunks if chunk.key.startswith(f"{BATCH}-"))


@given(machine=MACHINES)
def test_a_batch_only_step_takes_about_the_time_that_it_should_on_any_machine(machine: Machine) -> None:
    prompts = rows(8, BATCH, 1000)
    for _ in range(60):
        plan, took_ms = machine.step(prompts)
    tokens = batch_of(plan)[1]
    assert LEAST_TOKENS <= tokens <= MOST
    if tokens > LEAST_TOKENS:
        assert took_ms <= 1.1 * TARGET_MS
    if tokens < MOST:
        assert machine.cost(0, tokens + 1) >= 0.9 * TARGET_MS


def test_what_does_not_fill_a_step_does_not_change_what_one_may_have() -> None:
    machine = Machine(50, 1, 0.6)
    for _ in range(40):
        machine.step(rows(8, BATCH, 1000))
    before = machine.pace.limits(rows(1, BATCH, 1000))
    for _ in range(40):
        machine.step(rows(1, BATCH, 40))
    assert machine.pace.limits(rows(1, BATCH, 1000)) == before


@given(machine=MACHINES, urgent=st.integers(1, 20), batch=st.integers(1, 64))
def test_batch_rows_lengthen_the_steps_of_decoding_urgent_ones_by_their_share(
    machine: Machine, urgent: int, batch: int
) -> None:
    machine.step(rows(1, URGENT, 100))
    for number in range(1, 21):
        machine.step(rows(number, URGENT) if number % 2 else rows(batch + number, BATCH))
    plan, took_ms = machine.step([*rows(urgent, URGENT), *rows(batch, BATCH), *rows(2, BATCH, 100)])
    decoding, tokens = batch_of(plan)
    assert len(plan.decode) == urgent + decoding
    assert decoding >= min(batch, LEAST_ROWS)
    alone_ms = machine.cost(urgent, 0)
    if decoding > LEAST_ROWS or tokens:
        assert took_ms <= (1 + 1.05 * SHARE) * alone_ms
    if decoding < batch:
        assert machine.cost(urgent + decoding + 1, 0) >= (1 + 0.95 * SHARE) * alone_ms, "the rest was idle"


def test_batch_prompts_beside_decoding_urgent_rows_get_what_batch_rows_leave_and_never_nothing_alone() -> None:
    machine = Machine(40, 0.1, 0.5)
    assert machine.pace.limits([*rows(1, URGENT), *rows(1, BATCH, 500)]).batch_tokens == LEAST_TOKENS, "not known yet"
    for number in range(1, 41):
        machine.step(rows(8, BATCH, 1000) if number % 2 else rows(number, URGENT))
    plan, took_ms = machine.step([*rows(1, URGENT), *rows(1, BATCH, 500)])
    assert batch_of(plan)[1] > 1
    assert took_ms <= (1 + SHARE) * machine.cost(1, 0)
    assert batch_of(machine.step([*rows(1, URGENT), *rows(300, BATCH), *rows(1, BATCH, 500)])[0])[1] == 0


def test_a_batch_waits_while_an_urgent_prompt_is_computed() -> None:
    machine = Machine(50, 1, 0.6)
    running = [*rows(1, URGENT, 100), *rows(1, URGENT), *rows(4, BATCH), *rows(4, BATCH, 100)]
    plan, _ = machine.step(running)
    assert batch_of(plan) == (0, 0)
    assert len(plan.decode) == 1
    assert plan.chunks == (Chunk("0-100-0", 100),)


@given(machine=MACHINES)
def test_urgent_prompts_that_never_end_leave_the_batch_a_little_of_each_second(machine: Machine) -> None:
    urgent, batch = rows(3, URGENT, 100), [*rows(9, BATCH), *rows(9, BATCH, 500)]
    last_ms = machine.now_ms
    for _ in range(60):
        before_ms = machine.now_ms
        plan, _ = machine.step([*urgent, *batch])
        if any(batch_of(plan)):
            assert batch_of(plan) == (LEAST_ROWS, LEAST_TOKENS)
            assert sum(chunk.tokens for chunk in plan.chunks) == MOST
            last_ms = machine.now_ms
        assert before_ms - last_ms <= LEAST_EVERY_S * 1000


def test_after_some_abandoned_steps_one_is_short_and_is_not_abandoned() -> None:
    machine = Machine(10, 1, 0.1)
    prompts = rows(2, BATCH, 1000)
    for _ in range(30):
        machine.step(prompts)
    for _ in range(MOST_ABANDONED):
        assert machine.pace.may_abandon
        assert machine.pace.limits(prompts) == Limits(MOST, MOST)
        machine.pace.abandoned()
    assert not machine.pace.may_abandon
    assert machine.pace.limits(prompts) == Limits(MOST, LEAST_TOKENS)
    machine.step([*rows(1, URGENT, 5), *prompts])
    assert not machine.pace.may_abandon, "that was not the batch's"
    machine.step(prompts)
    assert machine.pace.may_abandon


def test_a_step_without_batch_work_is_as_it_ever_was() -> None:
    machine = Machine(50, 1, 0.6)
    for running in (rows(3, URGENT, 400), rows(70, 1), [*rows(3, URGENT, 400), *rows(70, 1)]):
        assert machine.pace.limits(running) == Limits(MOST)


def test_a_small_limit_of_tokens_is_kept() -> None:
    machine = Machine(10, 1, 0.1)
    machine.pace = Pace(7, TARGET_MS, lambda: machine.now_ms / 1000)
    assert machine.pace.limits(rows(1, BATCH, 100)) == Limits(7, 3)
    for _ in range(9):
        machine.step(rows(1, BATCH, 100))
    assert machine.pace.limits(rows(1, BATCH, 100)) == Limits(7, 7)


@pytest.mark.parametrize("slope", [0.0, 0.7, 3.0])
def test_a_line_is_found_again_and_what_never_differed_counts_in_full(slope: float) -> None:
    line = Line()
    assert (line.slope, line.at(5)) == (0, 0)
    for _ in range(10):
        line.add(4, 20 + slope * 4)
    assert line.slope == pytest.approx((20 + slope * 4) / 4)
    for x in (2, 8, 3, 30):
        line.add(x, 20 + slope * x)
    assert line.slope == pytest.approx(slope, abs=1e-9)
    assert line.at(100) == pytest.approx(20 + slope * 100)
    assert replace(line) == line
