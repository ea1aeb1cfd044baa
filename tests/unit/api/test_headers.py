"""What a request's headers say, however odd they are: Idempotency-Key, Prefer and X-Deadline-Ms."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from starlette.requests import Request

from prelay_api.config import ApiConfig
from prelay_api.deadline import deadline_ms
from prelay_api.idempotency import MAX_DEPTH, sent_under
from prelay_api.sse import lingers
from prelay_queue.settings import QueueSettings
from prelay_text.errors import RequestError

CONFIG = ApiConfig(QueueSettings("redis://localhost", "demo.0"), Path("model"), "demo")


def asked_with(*headers: tuple[str, str]) -> Request:
    lines = [(name.encode(), value.encode()) for name, value in headers]
    return Request({"type": "http", "method": "POST", "path": "/v1/completions", "headers": lines})


def keyed(key: str = "a", **more: str) -> Request:
    return asked_with(("idempotency-key", key), *more.items())


def nested(levels: int) -> dict[str, Any]:
    """An object with so many levels of arrays and objects, itself among them."""
    inner: Any = 1
    for _ in range(levels - 1):
        inner = [inner]
    return {"chat_template_kwargs": inner}


def test_a_body_may_nest_as_deeply_as_its_digest_can_be_made() -> None:
    first, again = sent_under(keyed(), nested(MAX_DEPTH)), sent_under(keyed(), nested(MAX_DEPTH))
    assert first == again
    assert first is not None


def test_a_body_that_nests_more_deeply_is_refused_under_a_key_and_no_server_error() -> None:
    with pytest.raises(RequestError, match=f"Idempotency-Key .* up to {MAX_DEPTH} levels") as caught:
        sent_under(keyed(), nested(MAX_DEPTH + 1))
    assert (caught.value.status, caught.value.code) == (400, "invalid_json")


def test_one_api_key_is_one_client_however_its_header_is_written() -> None:
    one, same, other = (
        sent_under(keyed(authorization=value), {}) for value in ("Bearer sk-a", "bearer  sk-a ", "Bearer sk-b")
    )
    assert one == same != other


def test_two_keys_are_refused_for_only_one_could_count() -> None:
    with pytest.raises(RequestError, match="may be sent once, not 2 times") as caught:
        sent_under(asked_with(("idempotency-key", "a"), ("idempotency-key", "b")), {})
    assert caught.value.param == "Idempotency-Key"


@pytest.mark.parametrize(
    "lines",
    [["resumable"], ["Resumable; a=1"], ["wait=3 , resumable"], ["wait=3", "resumable"]],
)
def test_a_preference_counts_wherever_it_stands(lines: list[str]) -> None:
    assert lingers(asked_with(*(("prefer", line) for line in lines)), CONFIG) == CONFIG.linger_s > 0


@pytest.mark.parametrize("lines", [[], [""], ["resumable2"], ["wait=resumable"], ["a; resumable"]])
def test_who_does_not_prefer_it_is_not_waited_for(lines: list[str]) -> None:
    assert lingers(asked_with(*(("prefer", line) for line in lines)), CONFIG) == 0


@pytest.mark.parametrize("value", ["0" * 19 + "1" + "9" * 30, "0" * 19 + "1" + "9" * 4400, "1" * 21])
def test_a_deadline_of_many_digits_is_refused_whatever_it_begins_with(value: str) -> None:
    with pytest.raises(RequestError, match="X-Deadline-Ms must be an integer from 1 to 86400000") as caught:
        deadline_ms([value], None)
    assert caught.value.param == "X-Deadline-Ms"


def test_deadlines_that_disagree_are_told_in_the_order_of_their_names() -> None:
    with pytest.raises(RequestError, match=r"X-Deadline-Ms and deadline_ms disagree \(5000, 4000\)"):
        deadline_ms(["5000"], 4000)


@pytest.mark.parametrize(("headers", "body", "said"), [([], None, None), (["5", "005"], 5, 5), ([], 7, 7)])
def test_deadlines_that_agree_are_one(headers: list[str], body: int | None, said: int | None) -> None:
    assert deadline_ms(headers, body) == said
