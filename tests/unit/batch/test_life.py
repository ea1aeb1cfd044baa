"""What becomes of a line when its jobs end."""

from __future__ import annotations

import orjson
import pytest

from prelay_batch.life import FAULT, MAX_CANCELLED, Again, Answered, Late, Refused, job_error
from tests.unit.batch.lines import ended, line


def error(status: object, **more: object) -> str:
    return orjson.dumps({"message": "no", "type": "t", "code": "c", "param": "p", "status": status, **more}).decode()


def test_a_line_is_answered_when_its_last_choice_ends_whatever_their_order() -> None:
    each = line(choices=3)
    assert each.on_end(2, ended(ids=(3,)), 3) is None
    assert each.on_end(0, ended("stop", ids=(1,)), 3) is None
    verdict = each.on_end(1, ended(ids=(2,)), 3)
    assert isinstance(verdict, Answered)
    assert [answer.ids for answer in verdict.answers] == [(1,), (2,), (3,)]


def test_each_try_has_jobs_of_its_own() -> None:
    each = line(7, choices=2)
    assert each.job_ids("b") == ["b-7-0/0", "b-7-0/1"]
    each.begin_again()
    assert each.job_ids("b") == ["b-7-1/0", "b-7-1/1"]


def test_what_one_try_has_answered_does_not_count_in_the_next() -> None:
    each = line(choices=2)
    each.on_end(0, ended(), 3)
    each.begin_again()
    assert each.on_end(1, ended(), 3) is None


def test_a_refusal_of_the_request_is_final() -> None:
    verdict = line().on_end(0, ended("error", error(400)), 3)
    assert isinstance(verdict, Refused)
    refusal = verdict.refusal
    assert (refusal.status, refusal.code, refusal.message, refusal.param) == (400, "c", "no", "p")


def test_a_fault_of_the_server_is_tried_three_times() -> None:
    each = line()
    verdicts = []
    for _ in range(3):
        verdicts.append(each.on_end(0, ended("error", error(500)), 3))
        each.begin_again()
    assert [type(verdict) for verdict in verdicts] == [Again, Again, Refused]


def test_a_cancel_that_we_did_not_ask_for_is_no_fault_and_yet_not_endless() -> None:
    each = line()
    for _ in range(MAX_CANCELLED):
        assert isinstance(each.on_end(0, ended("cancelled"), 3), Again)
        each.begin_again()
    verdict = each.on_end(0, ended("cancelled"), 3)
    assert isinstance(verdict, Refused)
    assert (verdict.refusal.status, verdict.refusal.code) == (500, "cancelled")


def test_a_deadline_is_told_as_the_server_tells_it() -> None:
    verdict = line().on_end(0, ended("deadline"), 3)
    assert isinstance(verdict, Late)
    assert (verdict.refusal.status, verdict.refusal.code) == (504, "deadline_exceeded")


@pytest.mark.parametrize("raw", ["", "7", "[]", "{}", "null", '{"message": 1, "status": "x"}', "\x00"])
def test_whatever_a_job_s_error_holds_it_is_a_fault(raw: str) -> None:
    assert job_error("a", raw).status == FAULT[2]


@pytest.mark.parametrize("status", [200, 399, 600, -1, True, "400", None])
def test_what_is_no_status_of_an_error_is_a_fault(status: object) -> None:
    assert job_error("a", error(status)).status == 500
