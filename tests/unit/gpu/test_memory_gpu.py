"""How many KV blocks a worker takes of its card, and what is said where it cannot have one context."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from prelay_engine.errors import ModelError, OutOfMemory
from prelay_engine.gpu.memory import (
    GRAPH_NBYTES,
    OVERHEAD_NBYTES,
    CardMemory,
    Demand,
    Measured,
    blocks_for,
    graphs_nbytes,
    is_out_of_memory,
    measure,
)

GIB = 2**30
#: A card of 80 GiB with a model of 16 beside nobody; one context takes 4 GiB.
DEMAND = Demand(
    fraction=0.9,
    total=80 * GIB,
    free=63 * GIB,
    held=16 * GIB,
    peak=19 * GIB,
    graphs=GIB,
    block_nbytes=2 << 20,
    context_blocks=2048,
)
DEMANDS = st.builds(
    Demand,
    fraction=st.floats(0.01, 1),
    total=st.just(80 * GIB),
    free=st.integers(0, 80 * GIB),
    held=st.integers(0, 30 * GIB),
    peak=st.integers(30 * GIB, 40 * GIB),
    graphs=st.integers(0, 4 * GIB),
    block_nbytes=st.integers(1 << 16, 1 << 24),
    context_blocks=st.integers(1, 4096),
)


def nbytes(demand: Demand) -> int:
    return blocks_for(demand) * demand.block_nbytes


@given(DEMANDS)
def test_a_worker_stays_within_its_share_and_what_is_free_holds_a_context_and_wastes_less_than_a_block(
    demand: Demand,
) -> None:
    share = int(demand.total * demand.fraction) - demand.peak - demand.graphs - OVERHEAD_NBYTES
    there = demand.free - (demand.peak - demand.held) - demand.graphs
    try:
        taken = nbytes(demand)
    except ModelError:
        assert min(share, there) < demand.context_blocks * demand.block_nbytes
    else:
        assert taken >= demand.context_blocks * demand.block_nbytes
        assert 0 <= min(share, there) - taken < demand.block_nbytes


def test_a_worker_takes_its_share_of_the_card_less_weights_step_graphs_and_context() -> None:
    assert nbytes(DEMAND) == 72 * GIB - 19 * GIB - GIB - OVERHEAD_NBYTES


def test_what_somebody_else_holds_makes_it_less_but_what_is_free_never_makes_it_more() -> None:
    assert nbytes(replace(DEMAND, free=30 * GIB)) == 30 * GIB - 3 * GIB - GIB
    assert nbytes(replace(DEMAND, free=64 * GIB)) == nbytes(DEMAND)


@pytest.mark.parametrize("share", [0.315, 0.585])
@pytest.mark.parametrize("first_has_taken", [0.0, 0.5, 1.0])
def test_two_workers_that_start_at_once_both_get_their_share_whatever_the_other_has_taken_yet(
    share: float, first_has_taken: float
) -> None:
    demand = replace(DEMAND, fraction=share)
    others = int(first_has_taken * (0.9 - share) * demand.total)
    context = 512 << 20
    alone = replace(demand, free=demand.total - demand.held - context)
    assert blocks_for(replace(alone, free=alone.free - others)) == blocks_for(alone)


def test_without_room_for_one_context_the_message_says_what_is_needed_what_there_is_and_what_helps() -> None:
    with pytest.raises(ModelError) as caught:
        blocks_for(replace(DEMAND, fraction=0.25))
    assert str(caught.value) == (
        "one sequence of full length takes 4.0 GiB of KV blocks, and weights, the largest step and CUDA graphs "
        "20.8 GiB: 24.8 GiB are needed, but --gpu-memory-utilization gives this worker 20.0 GiB of the card's "
        "80.0 GiB: raise it, shorten --max-model-len, or lower --prefill-chunk"
    )
    with pytest.raises(ModelError) as caught:
        blocks_for(replace(DEMAND, free=6 * GIB))
    assert str(caught.value) == (
        "one sequence of full length takes 4.0 GiB of KV blocks; --gpu-memory-utilization gives this worker 72.0 GiB "
        "of the card's 80.0 GiB, but others have taken so much that only 2.0 GiB are left for it: stop them, or "
        "shorten --max-model-len"
    )


# What a step takes


@dataclass
class FakeMemory:
    """16 GiB of weights on a card of 80; a step's tensors come and go."""

    asked: list[str] = field(default_factory=list)
    now: int = 16 * GIB
    most: int = 40 * GIB  # of what was before

    def start(self) -> int:
        self.asked.append("start")
        self.most = self.now
        return self.now

    def use(self, more: int) -> None:
        self.asked.append("step")
        self.most = max(self.most, self.now + more)

    def peak(self) -> int:
        self.asked.append("peak")
        return self.most

    def free_total(self) -> tuple[int, int]:
        self.asked.append("free")
        return 60 * GIB, 80 * GIB


def test_the_peak_is_that_of_the_largest_step_and_not_of_loading() -> None:
    memory = FakeMemory()
    found = measure(memory, lambda tokens, rows: memory.use(tokens * GIB // 1000 + rows), 2000, 32)
    assert found == Measured(held=16 * GIB, peak=18 * GIB + 32, free=60 * GIB, total=80 * GIB)
    assert memory.asked == ["start", "step", "peak", "free"]


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory"), OutOfMemory()])
def test_a_largest_step_without_memory_names_the_settings_that_make_it_smaller(error: Exception) -> None:
    def step(tokens: int, rows: int) -> None:
        raise error

    with pytest.raises(ModelError, match=r"2048 prompt tokens and 32 rows .* --prefill-chunk") as caught:
        measure(FakeMemory(), step, 2048, 32)
    assert caught.value.__context__ is None


def test_any_other_error_of_the_largest_step_is_not_hidden() -> None:
    def step(tokens: int, rows: int) -> None:
        raise RuntimeError("an illegal memory access was encountered")

    with pytest.raises(RuntimeError, match="illegal memory access"):
        measure(FakeMemory(), step, 1, 1)


def test_the_card_is_asked_when_its_work_is_done_and_what_torch_only_keeps_is_free(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    device, calls = torch.device("cuda:1"), []
    answers = {"memory_allocated": 5, "max_memory_allocated": 9, "mem_get_info": (3, 7), "empty_cache": None}
    for name in (*answers, "synchronize", "reset_peak_memory_stats"):

        def noted(*given: object, name: str = name) -> object:
            calls.append((name, *given))
            return answers.get(name)

        monkeypatch.setattr(torch.cuda, name, noted)
    memory = CardMemory(device)
    assert (memory.start(), memory.peak(), memory.free_total()) == (5, 9, (3, 7))
    assert calls == [
        ("synchronize", device),
        ("reset_peak_memory_stats", device),
        ("memory_allocated", device),
        ("synchronize", device),
        ("max_memory_allocated", device),
        ("synchronize", device),
        ("empty_cache",),
        ("mem_get_info", device),
    ]


def test_graphs_share_the_memory_of_the_largest_step() -> None:
    assert graphs_nbytes(20, GIB) == GIB + 20 * GRAPH_NBYTES


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (torch.OutOfMemoryError("CUDA out of memory."), True),
        (OutOfMemory(), True),
        (RuntimeError("Triton Error [CUDA]: out of memory"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), False),
        (ValueError("out of memory"), False),
    ],
)
def test_an_error_says_whether_memory_ran_out(error: Exception, expected: bool) -> None:
    assert is_out_of_memory(error) is expected
