from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from prelay_engine.scheduler import Chunk, Limits, Plan, Row, schedule


def decoding(
    key: str, *, priority: int = 1, arrival: int = 0, needs: int = 0, holds: int = 1, reserved: bool = False
) -> Row:
    return Row(key, priority, arrival, reserved, 0, 0 if reserved else needs, holds)


def prompt(key: str, todo: int, *, priority: int = 1, arrival: int = 0, holds: int = 1) -> Row:
    return Row(key, priority, arrival, False, todo, 0, holds)


def test_all_decoding_rows_run_and_the_prompts_share_the_budget_in_order_of_urgency() -> None:
    rows = [prompt("late", 100, arrival=2), prompt("urgent", 30, priority=0, arrival=9), decoding("d")]
    assert schedule(rows, 0, Limits(64)) == Plan(("d",), (Chunk("urgent", 30), Chunk("late", 34)), ())


def test_the_lowest_priority_is_evicted_first_and_then_the_latest() -> None:
    rows = [
        decoding("needy", priority=0, needs=1),
        decoding("early batch", priority=2, arrival=1),
        decoding("late batch", priority=2, arrival=5),
        decoding("normal", priority=1, arrival=9),
    ]
    plan = schedule(rows, 0, Limits(8))
    assert plan.evicted == ("late batch",)
    assert set(plan.decode) == {"needy", "early batch", "normal"}


def test_a_row_that_is_itself_the_least_is_the_victim() -> None:
    rows = [decoding("first", arrival=1), decoding("last", arrival=2, needs=1)]
    assert schedule(rows, 0, Limits(8)) == Plan(("first",), (), ("last",))


def test_a_reserved_row_is_never_evicted_whatever_its_class() -> None:
    rows = [decoding("urgent", priority=0, needs=1), decoding("kept", priority=2, reserved=True, holds=9)]
    assert schedule(rows, 0, Limits(8)) == Plan(("kept",), (), ("urgent",))


def test_prompts_can_be_evicted_too_and_then_get_no_chunk() -> None:
    rows = [decoding("d", arrival=1, needs=1), prompt("p", 50, arrival=2, holds=4)]
    assert schedule(rows, 0, Limits(64)) == Plan(("d",), (), ("p",))


def test_batch_rows_beyond_the_limit_pause_the_latest_first_and_keep_what_they_hold() -> None:
    rows = [decoding(f"b{n}", priority=2, arrival=n, needs=1) for n in range(4)]
    rows.append(decoding("now", priority=0, needs=1))
    assert schedule(rows, 2, Limits(8, batch_rows=1)) == Plan(("now", "b0"), (), ())
    assert schedule(rows, 0, Limits(8, batch_rows=1)) == Plan(("now", "b0"), (), ("b3", "b2"))
    assert schedule(rows, 1, Limits(8, batch_rows=0)) == Plan(("now",), (), ())


def test_prompts_of_class_batch_have_their_own_limit_and_what_is_kept_for_them() -> None:
    rows = [prompt("b", 50, priority=2), prompt("c", 50, priority=2, arrival=1), prompt("n", 20)]
    assert schedule(rows, 0, Limits(64, batch_tokens=0)).chunks == (Chunk("n", 20),)
    assert schedule(rows, 0, Limits(64, batch_tokens=60)).chunks == (Chunk("n", 20), Chunk("b", 44))
    assert schedule(rows, 0, Limits(99, batch_tokens=60)).chunks == (Chunk("n", 20), Chunk("b", 50), Chunk("c", 10))
    assert schedule(rows, 0, Limits(24, 8, kept_tokens=8)).chunks == (Chunk("n", 16), Chunk("b", 8))
    assert schedule(rows[:2], 0, Limits(24, 8, kept_tokens=8)).chunks == (Chunk("b", 8),)


ROWS = st.lists(
    st.builds(
        lambda priority, arrival, reserved, todo, needs, holds: (priority, arrival, reserved, todo, needs, holds),
        st.integers(0, 2),
        st.integers(0, 5),
        st.booleans(),
        st.sampled_from([0, 0, 1, 40, 300]),
        st.integers(0, 1),
        st.integers(1, 6),
    ),
    max_size=12,
).map(
    lambda parts: [
        Row(f"k{i}", priority, arrival, reserved, todo, 0 if reserved or todo else needs, holds)
        for i, (priority, arrival, reserved, todo, needs, holds) in enumerate(parts)
    ]
)


@given(rows=ROWS, free=st.integers(0, 4), budget=st.integers(1, 128))
def test_any_plan_is_one_that_can_be_carried_out(rows: list[Row], free: int, budget: int) -> None:
    plan = schedule(rows, free, Limits(budget))
    by_key = {row.key: row for row in rows}
    evicted = set(plan.evicted)
    chunked = {chunk.key for chunk in plan.chunks}

    assert len(evicted) == len(plan.evicted)
    assert not evicted & (set(plan.decode) | chunked)
    assert set(plan.decode) | evicted == {row.key for row in rows if not row.todo} | evicted
    # Blocks: what decoding rows take was free or was freed.
    freed = sum(by_key[key].holds for key in evicted)
    assert sum(by_key[key].needs for key in plan.decode) <= free + freed
    # The budget is kept and not left unused.
    tokens = sum(chunk.tokens for chunk in plan.chunks)
    waiting = sum(row.todo for row in rows if row.key not in evicted)
    assert tokens == min(budget, waiting)
    assert all(0 < chunk.tokens <= by_key[chunk.key].todo for chunk in plan.chunks)


@given(rows=ROWS, free=st.integers(0, 4))
def test_nobody_is_evicted_for_somebody_of_less_precedence(rows: list[Row], free: int) -> None:
    plan = schedule(rows, free, Limits(64))
    by_key = {row.key: row for row in rows}

    def place(row: Row) -> tuple[int, bool, int, str]:
        return (row.priority, not row.reserved, row.arrival_ms, row.key)

    assert not any(by_key[key].reserved for key in plan.evicted)
    needy = [row for row in rows if row.needs]
    if not needy or sum(row.needs for row in needy) <= free:
        assert not plan.evicted
    for key in plan.evicted:
        # For a victim's sake: somebody before it (or itself) needed a block.
        assert any(place(row) <= place(by_key[key]) for row in needy)


@given(rows=ROWS, free=st.integers(0, 4))
def test_the_row_of_most_precedence_gets_on_unless_only_reserved_rows_hold_blocks(rows: list[Row], free: int) -> None:
    plan = schedule(rows, free, Limits(64))
    if not rows:
        return
    first = min(rows, key=lambda row: (row.priority, not row.reserved, row.arrival_ms, row.key))
    others = [row for row in rows if row is not first and not row.reserved]
    if first.needs <= free + sum(row.holds for row in others):
        assert first.key not in plan.evicted


LIMITS = st.builds(Limits, st.integers(1, 128), st.integers(0, 64), st.integers(0, 6), st.integers(0, 64))


@given(rows=ROWS, free=st.integers(0, 4), limits=LIMITS)
def test_limits_of_the_batch_are_kept_and_cost_nobody_else_anything(rows: list[Row], free: int, limits: Limits) -> None:
    plan, free_plan = schedule(rows, free, limits), schedule(rows, free, Limits(limits.tokens))
    batch = {row.key for row in rows if row.priority == 2}
    assert limits.batch_tokens is not None
    assert limits.batch_rows is not None
    assert sum(chunk.tokens for chunk in plan.chunks if chunk.key in batch) <= limits.batch_tokens
    assert len(batch.intersection(plan.decode)) <= limits.batch_rows
    others = {row.key for row in rows} - batch
    assert others.intersection(plan.decode) == others.intersection(free_plan.decode)
    assert set(plan.evicted) <= set(free_plan.evicted), "who pauses needs nothing"
    urgent = sum(chunk.tokens for chunk in plan.chunks if chunk.key in others)
    waiting = sum(row.todo for row in rows if row.key in others.difference(plan.evicted))
    assert urgent == min(waiting, max(0, limits.tokens - limits.kept_tokens))


@given(rows=ROWS, free=st.integers(0, 4))
def test_the_order_of_the_rows_does_not_matter(rows: list[Row], free: int) -> None:
    assert schedule(rows, free, Limits(64)) == schedule(rows[::-1], free, Limits(64))
