"""Key names: one hash tag per partition, nothing shared between fleets."""

from __future__ import annotations

import re
from collections.abc import Iterator

from hypothesis import given
from hypothesis import strategies as st

from prelay_queue.job import Priority
from prelay_queue.keys import CLASS_ORDER, Keys

TAG = re.compile(r"^prelay:\{([^{}]+)\}:")


def _all_keys(keys: Keys) -> Iterator[str]:
    yield from (
        keys.queued, keys.leases, keys.preempted, keys.deadlines, keys.waiting, keys.drain,
        keys.domains, keys.workers, keys.dead,
    )  # fmt: skip
    yield from (keys.job("r/0"), keys.log("r/0"), keys.live("a"), keys.apis, keys.control("w"), keys.worker("w"))
    yield from (keys.batch("b"), keys.batches, *keys.work("prefill"), *keys.work("decode:d"))


def test_every_key_of_a_partition_has_the_partitions_hash_tag() -> None:
    for key in _all_keys(Keys("fleet", 3)):
        found = TAG.match(key)
        assert found is not None
        assert found[1] == "fleet.3"


def test_no_two_keys_of_a_partition_are_the_same() -> None:
    keys = list(_all_keys(Keys("f")))
    assert len(set(keys)) == len(keys)


@given(st.tuples(st.from_regex(r"[a-z0-9]{1,8}", fullmatch=True), st.integers(0, 99)), st.data())
def test_fleets_and_partitions_share_no_key(one: tuple[str, int], data: st.DataObject) -> None:
    other = data.draw(st.tuples(st.from_regex(r"[a-z0-9]{1,8}", fullmatch=True), st.integers(0, 99)))
    if one != other:
        assert not set(_all_keys(Keys(*one))) & set(_all_keys(Keys(*other)))


def test_a_restarted_job_is_served_before_a_new_one_of_its_class_and_never_before_a_higher_class() -> None:
    assert CLASS_ORDER == (
        "interactive:r", "interactive:n", "normal:r", "normal:n", "batch:r", "batch:n",
    )  # fmt: skip
    assert [Priority(name.partition(":")[0]) for name in CLASS_ORDER[::2]] == list(Priority)
    assert Keys("f").work("prefill")[0].endswith(":work:prefill:interactive:r")
