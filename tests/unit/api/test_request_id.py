"""A name tells when it was given."""

from __future__ import annotations

import re
import time
from importlib import resources

import pytest

from prelay_api.request_id import SKEW_S, new_id, was_given
from prelay_api.resume import unknown


@pytest.mark.parametrize("kind", ["cmpl", "chatcmpl"])
def test_a_name_that_was_given_is_known_as_such(kind: str) -> None:
    assert was_given(new_id(kind))
    assert len({new_id(kind) for _ in range(1000)}) == 1000


@pytest.mark.parametrize(
    "name",
    ["", "cmpl-", "cmpl-0123", "batch_1-2-0", f"cmpl-{23 * '0'}", f"cmpl-{25 * '0'}", f"cmpl-{24 * 'A'}", 40 * "x"],
)
def test_any_other_name_was_never_given(name: str) -> None:
    assert not was_given(name)
    assert unknown(name).status == 404


def test_a_name_of_the_future_was_not_given_whatever_the_clocks() -> None:
    def at(seconds: float) -> str:
        return f"cmpl-{int(seconds):08x}{16 * '0'}"

    assert was_given(at(time.time() + SKEW_S - 10))
    assert not was_given(at(time.time() + SKEW_S + 10))


def test_what_is_said_of_a_stream_that_is_gone_is_what_the_queue_does() -> None:
    source = (resources.files("prelay_queue") / "lua" / "_lib.lua").read_text()
    kept = [int(found) // 1000 for found in re.findall(r"local (?:KEYED_)?RETENTION_MS = (\d+)", source)]
    said = unknown(new_id("cmpl")).message
    assert (f"{kept[0]} s" in said, f"{kept[1] // 3600} h" in said) == (True, True)
