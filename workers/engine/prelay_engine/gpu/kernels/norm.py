"""RMSNorm: one row after the other, in float32."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language import tensor

#: Numbers of a row that are worked on at a time, at most.
_TILE = 4096
#: Numbers that a program takes at least: of narrow rows, as heads' norms have them, several.
_LEAST = 1024


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x / sqrt(mean(x²) + eps) · weight over the last dimension, in float32, rounded once → contiguous, dtype of x.

    x [rows, width] or [rows, heads, width] in float32, float16 or bfloat16, with any strides before its last dimension,
    which is contiguous. weight float32 [width]. How rows are cut depends on their width only, and so do their bits.
    Nothing is compiled for a number of rows or heads: models have tokens in either place.
    """
    width = x.shape[-1]
    assert x.ndim in (2, 3)
    assert x.stride(-1) == 1
    assert weight.dtype == torch.float32
    assert weight.shape == (width,)
    assert weight.is_contiguous()
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    heads = x.shape[1] if x.ndim == 3 else 1
    rows = x.shape[0] * heads
    if rows == 0:
        return out
    tile = min(_TILE, triton.next_power_of_2(width))
    held = max(1, _LEAST // tile)
    # What one of a kind has may be anything, and would be compiled for.
    row_stride, head_stride = x.stride(0) if x.shape[0] > 1 else width, x.stride(1) if heads > 1 else width
    _rms_norm[(triton.cdiv(rows, held),)](
        x, weight, out, rows, heads, row_stride, head_stride, eps, WIDTH=width, ROWS=held, TILE=tile,
        num_warps=8 if tile > 2048 else 4, enable_fp_fusion=False,
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["rows", "heads"])  # type: ignore[untyped-decorator]
def _rms_norm(
    x: tensor, weight: tensor, out: tensor, rows: tensor, heads: tensor, row_stride: tensor, head_stride: tensor,
    eps: tensor, WIDTH: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr,
) -> None:  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    lane = tl.arange(0, TILE)[None, :]
    x += (row // heads).to(tl.int64) * row_stride + (row % heads).to(tl.int64) * head_stride
    out += row.to(tl.int64) * WIDTH
    squares = tl.zeros((ROWS, TILE), tl.float32)
    for start in range(0, WIDTH, TILE):
        number = start + lane
        value = tl.load(x + number, mask=(row < rows) & (number < WIDTH), other=0.0).to(tl.float32)
        squares += value * value
    scale = tl.rsqrt(tl.sum(squares, axis=1, keep_dims=True) / WIDTH + eps)
    for start in range(0, WIDTH, TILE):
        number = start + lane
        real = (row < rows) & (number < WIDTH)
        value = tl.load(x + number, mask=real, other=0.0).to(tl.float32)
        value = value * scale * tl.load(weight + number, mask=number < WIDTH, other=0.0)
        tl.store(out + number, value.to(out.dtype.element_ty), mask=real)
