"""Where workers are put among GPUs, and how they share them."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prelay.cards import DECODE_SHARE, PREFILL_SHARE, gpu_config, places
from prelay.errors import BadUsage
from prelay.settings import load


def placed(**given: object) -> dict[str, tuple[int, float]]:
    found = places(load({"device": "cuda", "redis_url": "redis://queue:6379/0"} | given, None))
    return {name: (place.gpu, place.share) for name, place in found.items()}


def test_prefill_and_decode_beside_each_other_share_by_what_they_keep() -> None:
    assert placed(gpu_memory_utilization=1.0) == {"prefill-0": (0, PREFILL_SHARE), "decode-0": (0, DECODE_SHARE)}


def test_each_has_a_card_of_its_own_where_there_are_two() -> None:
    assert placed(decode_gpus="1") == {"prefill-0": (0, 0.9), "decode-0": (1, 0.9)}


def test_more_workers_than_cards_begin_again_from_the_front() -> None:
    found = placed(prefill=0, decode=3, decode_gpus=" 2, 5", gpu_memory_utilization=0.8)
    assert found == {"decode-0": (2, 0.4), "decode-1": (5, 0.8), "decode-2": (2, 0.4)}


def test_unified_workers_are_put_where_decode_workers_are_and_share_alike() -> None:
    assert placed(unified=2, decode_gpus="3") == {"unified-0": (3, 0.45), "unified-1": (3, 0.45)}


def test_on_a_cpu_and_with_the_null_model_nobody_has_a_place() -> None:
    assert places(load({}, None)) == places(load({"device": "cuda", "null_model": True}, None)) == {}
    assert gpu_config(load({}, None)) is gpu_config(load({"device": "cuda", "null_model": True}, None)) is None


@given(*(st.integers(0, 4) for _ in range(3)), st.sampled_from(["0", "1,0", "0,1,2"]), st.floats(0.1, 1))
def test_the_workers_of_each_card_take_all_that_they_may_together_and_each_of_them_something(
    prefill: int, decode: int, unified: int, gpus: str, utilization: float
) -> None:
    found = placed(
        prefill=prefill, decode=decode, unified=unified, decode_gpus=gpus, gpu_memory_utilization=utilization
    )
    taken: Counter[int] = Counter()
    for gpu, share in found.values():
        assert share > 0
        taken[gpu] += share  # type: ignore[assignment]
    assert len(found) == prefill + decode + unified
    assert all(total == pytest.approx(utilization) for total in taken.values())


@pytest.mark.parametrize("gpus", ["", "a", "0,,1", "-1", "0;1", "1024", "0.5"])
def test_what_names_no_gpus_is_refused_with_the_value(gpus: str) -> None:
    with pytest.raises(BadUsage, match="must be numbers of GPUs"):
        load({"decode_gpus": gpus}, None)


def test_a_worker_is_told_how_to_use_its_card() -> None:
    found = gpu_config(load({"device": "cuda", "gpu": 3, "exact": "on", "cuda_graphs": "off"}, None))
    assert found is not None
    assert (found.device, found.memory_utilization, found.exact, found.graphs) == ("cuda:3", 0.9, True, False)
