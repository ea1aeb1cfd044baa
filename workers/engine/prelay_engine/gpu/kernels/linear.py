"""Matrix products whose rows do not depend on how many rows are computed at once."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.language import tensor

#: Tiles of rows that follow one another on the same tiles of a weight, while those are in the L2 cache.
_GROUP = 8
#: Weights with fewer columns than this are cut into narrower tiles: a step with few rows reads weights and does
#: little else, and needs programs on as many multiprocessors as there are to read them with.
_WIDE = 8192


@dataclass(frozen=True, slots=True)
class Tile:
    """How a product is cut: by its dtype and its weight, never by its rows."""

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int


_SINGLE = Tile(rows=64, columns=64, depth=16, warps=4, stages=3)
_NARROW = Tile(rows=128, columns=64, depth=64, warps=4, stages=5)
_BROAD = Tile(rows=128, columns=128, depth=64, warps=8, stages=4)


def tile_of(dtype: torch.dtype, columns: int) -> Tile:
    """The tile for a weight [columns, depth] in this dtype."""
    if dtype == torch.float32:
        return _SINGLE
    return _BROAD if columns >= _WIDE else _NARROW


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x [rows, depth] · weightᵀ [columns, depth] + bias [columns] → [rows, columns] in the dtype of x.

    float32, float16 or bfloat16, the same for x and weight; bias may be any of them. Products are added up in float32,
    and rounded once. A row's bits depend on that row, the weight and the bias: each is added up by the same
    instructions over the same tiles of depth in rising order, however many others there are.

    The last dimension of x and weight is contiguous. Nothing is compiled for a number of rows; what is compiled at the
    first call of a dtype and weight shape cannot be compiled inside a CUDA graph's capture.
    """
    rows, depth = x.shape
    columns = weight.shape[0]
    assert x.dtype == weight.dtype
    assert weight.shape == (columns, depth)
    assert bias is None or (bias.shape == (columns,) and bias.is_contiguous())
    assert x.stride(1) == weight.stride(1) == 1
    out = torch.empty(rows, columns, dtype=x.dtype, device=x.device)
    if rows == 0:
        return out
    tile = tile_of(x.dtype, columns)
    _linear[(triton.cdiv(rows, tile.rows) * triton.cdiv(columns, tile.columns),)](
        x, weight, bias, out, rows, columns, depth,
        x.stride(0) if rows > 1 else depth,  # what one row has may be anything, and would be compiled for
        weight.stride(0),
        EVEN=depth % tile.depth == 0,
        BLOCK_M=tile.rows, BLOCK_N=tile.columns, BLOCK_K=tile.depth, GROUP=_GROUP,
        num_warps=tile.warps, num_stages=tile.stages, enable_fp_fusion=True,
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["rows"])  # type: ignore[untyped-decorator]
def _linear(
    x: tensor, weight: tensor, bias: tensor, out: tensor, rows: tensor, columns: tensor, depth: tensor, x_row: tensor,
    weight_row: tensor, EVEN: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
) -> None:  # fmt: skip
    # Programs that run at the same time take a square of tiles rather than a line: they share what they read.
    down, across = tl.cdiv(rows, BLOCK_M), tl.cdiv(columns, BLOCK_N)
    first = tl.program_id(0) // (GROUP * across) * GROUP
    high = tl.minimum(down - first, GROUP)
    within = tl.program_id(0) % (GROUP * across)
    row = (first + within % high) * BLOCK_M + tl.arange(0, BLOCK_M)
    column = within // high * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)

    # A matrix may have more numbers than 32 bits count.
    left = x + row.to(tl.int64)[:, None] * x_row + k[None, :]
    right = weight + column.to(tl.int64)[None, :] * weight_row + k[:, None]
    real_row, real_column = (row < rows)[:, None], (column < columns)[None, :]
    sums = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, depth, BLOCK_K):
        if EVEN:
            a = tl.load(left, mask=real_row, other=0.0)
            b = tl.load(right, mask=real_column, other=0.0)
        else:
            a = tl.load(left, mask=real_row & (start + k < depth)[None, :], other=0.0)
            b = tl.load(right, mask=real_column & (start + k < depth)[:, None], other=0.0)
        sums = tl.dot(a, b, sums, input_precision="ieee")
        left += BLOCK_K
        right += BLOCK_K
    if bias is not None:
        sums += tl.load(bias + column, mask=column < columns, other=0.0).to(tl.float32)[None, :]
    to = out + row.to(tl.int64)[:, None] * columns + column[None, :]
    tl.store(to, sums.to(out.dtype.element_ty), mask=real_row & real_column)
