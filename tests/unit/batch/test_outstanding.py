"""Which job is of which line."""

from __future__ import annotations

from prelay_batch.outstanding import Outstanding
from tests.unit.batch.lines import line


def test_jobs_are_found_by_their_ids_until_they_are_over() -> None:
    jobs, pair, other = Outstanding("b"), line(3, choices=2), line(4)
    jobs.add(pair)
    jobs.add(other)
    assert (len(jobs), jobs.tokens, jobs.lines()) == (3, 6, [pair, other])
    assert jobs.of("b-3-0/1") == (pair, 1)
    jobs.over("b-3-0/1")
    assert (list(jobs), jobs.tokens) == (["b-3-0/0", "b-4-0/0"], 4)
    assert jobs.drop(pair) == ["b-3-0/0"]
    assert jobs.drop(pair) == []
    assert (list(jobs), jobs.tokens) == (["b-4-0/0"], 2)


def test_jobs_of_an_earlier_try_are_nobody_s() -> None:
    jobs, each = Outstanding("b"), line(3)
    jobs.add(each)
    jobs.drop(each)
    each.begin_again()
    jobs.add(each)
    assert "b-3-0/0" not in jobs
    assert "b-3-1/0" in jobs


def test_silent_are_those_that_were_not_heard_of_for_long() -> None:
    jobs, old, new = Outstanding("b"), line(1), line(2)
    old.looked, new.looked = 5.0, 10.0
    jobs.add(old)
    jobs.add(new)
    assert jobs.silent(before=7.0) == ["b-1-0/0"]
