"""When RQ's job of a batch that nobody runs will be run."""

from __future__ import annotations

import pytest

from prelay_queue.batch_jobs import MOVING_MS, STARTING_MS, Standing


@pytest.mark.parametrize(
    ("standing", "will_run"),
    [
        (Standing(), False),
        (Standing("queued", listed=True), True),
        (Standing("queued"), False),
        (Standing("queued", moving_ms=1), True),
        (Standing("queued", moving_ms=MOVING_MS), False),
        (Standing("started", started_ms=1), True),
        (Standing("started", started_ms=STARTING_MS), False),
        (Standing("started", started_ms=-5), False),  # the worker's clock is ahead: better twice than never
        (Standing("started", listed=True, started_ms=STARTING_MS), False),
        *((Standing(status, listed=True), False) for status in ("failed", "finished", "scheduled", "canceled", "odd")),
    ],
    ids=str,
)
def test_a_job_will_run_that_waits_or_just_begins(standing: Standing, will_run: bool) -> None:
    assert standing.will_run is will_run
