"""New keys and values come to their slots, and nothing else is written."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from prelay_engine.gpu.kernels.write_kv import write_kv


def written(dtype: torch.dtype, kv_heads: int, dim: int, block_size: int, layer: int = 1) -> None:
    """Write rows of one layer out of a packed projection, and compare the whole pool."""
    pool = torch.full((5, 3, 2, kv_heads, block_size, dim), -1.0, dtype=dtype)
    expected = pool.clone()
    packed = torch.randn(4, 3 * kv_heads, dim).to(dtype)
    keys, values = packed[:, kv_heads : 2 * kv_heads], packed[:, 2 * kv_heads :]
    slots = torch.tensor([3 * block_size, -1, 5 * block_size - 1, block_size // 2])
    for row, slot in enumerate(slots.tolist()):
        if slot >= 0:
            expected[slot // block_size, layer, 0, :, slot % block_size] = keys[row]
            expected[slot // block_size, layer, 1, :, slot % block_size] = values[row]
    write_kv(pool, layer, keys, values, slots)
    assert torch.equal(pool, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("kv_heads", "dim", "block_size"), [(1, 64, 1), (2, 80, 16), (3, 128, 64), (40, 256, 5)])
def test_rows_go_to_their_slots_and_nothing_else_changes(
    dtype: torch.dtype, kv_heads: int, dim: int, block_size: int
) -> None:
    written(dtype, kv_heads, dim, block_size)


@pytest.mark.parametrize("layer", [0, 2])
def test_other_layers_are_left_alone(layer: int) -> None:
    written(torch.float16, 2, 64, 16, layer)


def test_no_rows_are_no_work() -> None:
    pool = torch.zeros(1, 1, 2, 1, 4, 16)
    none = torch.zeros(0, 1, 16)
    write_kv(pool, 0, none, none, torch.zeros(0, dtype=torch.int64))
    assert not pool.any()


def test_pools_may_have_more_than_two_to_the_31_numbers(tmp_path: Path) -> None:
    blocks, shape = 2**21 + 2, (1, 2, 1, 8, 64)
    pool = torch.from_file(str(tmp_path / "pool"), shared=True, size=blocks * 1024, dtype=torch.float16)
    pool = pool.view(blocks, *shape)  # sparse: only the pages that are written exist
    keys = torch.ones(1, 1, 64, dtype=torch.float16)
    write_kv(pool, 0, keys, 2 * keys, torch.tensor([(blocks - 1) * 8 + 3]))
    assert pool[-1, 0, :, 0, :, 0].tolist() == [[0, 0, 0, 1, 0, 0, 0, 0], [0, 0, 0, 2, 0, 0, 0, 0]]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"keys": torch.zeros(2, 2, 16, dtype=torch.float16)}, "dtype"),
        ({"keys": torch.zeros(2, 1, 16)}, "kv_head"),
        ({"slots": torch.zeros(2, dtype=torch.int32)}, "int64"),
        ({"slots": torch.zeros(3, dtype=torch.int64)}, "int64"),
        ({"values": torch.zeros(2, 16, 2).transpose(1, 2)}, "lie together"),
    ],
)
def test_what_does_not_fit_is_refused(change: dict[str, torch.Tensor], message: str) -> None:
    given = {"keys": torch.zeros(2, 2, 16), "values": torch.zeros(2, 2, 16), "slots": torch.tensor([0, 1])} | change
    with pytest.raises(ValueError, match=message):
        write_kv(torch.zeros(1, 1, 2, 2, 4, 16), 0, given["keys"], given["values"], given["slots"])
