"""How ends that are no answers are told."""

from __future__ import annotations

import orjson
import pytest

from prelay_api.outcome import CANCELLED, CLOSING, DEADLINE, INTERNAL, Failure, failure
from prelay_api.relay import End
from prelay_queue.job import FinishReason


@pytest.mark.parametrize("reason", [FinishReason.STOP, FinishReason.LENGTH])
def test_a_complete_answer_has_no_failure(reason: FinishReason) -> None:
    assert failure(End(reason)) is None


@pytest.mark.parametrize(
    ("reason", "expected"), [(FinishReason.CANCELLED, CANCELLED), (FinishReason.DEADLINE, DEADLINE)]
)
def test_an_end_from_outside_has_its_own_status(reason: FinishReason, expected: Failure) -> None:
    assert failure(End(reason)) == expected


def test_a_failure_travels_and_comes_back() -> None:
    assert failure(End(FinishReason.ERROR, CLOSING.encode())) == CLOSING


@pytest.mark.parametrize("error", ["", "no json", "[]", "{}", '"text"', "null", '{"type": "x"}'])
def test_whatever_a_job_says_the_client_gets_an_error(error: str) -> None:
    assert failure(End(FinishReason.ERROR, error)) == INTERNAL


@pytest.mark.parametrize("status", [0, 200, 302, 600, "400", None, True])
def test_a_status_that_is_no_error_becomes_500(status: object) -> None:
    found = failure(End(FinishReason.ERROR, orjson.dumps({"message": "m", "status": status}).decode()))
    assert found is not None
    assert found.status == 500
    assert set(orjson.loads(found.body)["error"]) == {"message", "type", "param", "code"}
