"""Attention of decoding rows, one a sequence: its keys are split among programs, whose sums a second kernel adds up.

The number of parts is fixed, and which keys a part takes follows from the row's own length: the grid is the same in
every step, so that CUDA graphs can hold it, and a row's bits depend on no other row.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton.language import tensor

from .paged import LOG2_E, absorb, need, need_attention, padded, powers, strides

#: Programs that share the keys of a row and key head.
PARTS = 16

#: Keys are asked for two splits ahead, and what table entry they are at two splits before that.
_STAGES = 5


class Scratch(NamedTuple):
    """What `decode` works in. Steps that never run at the same time can share one, of the largest number of rows."""

    sums: torch.Tensor  # float32 [row, head, PARTS, head_dim]
    stats: torch.Tensor  # float32 [row, head, PARTS, 2]: highest score, in powers of two, and sum of the shares


def scratch(rows: int, heads: int, dim: int, device: torch.device | str) -> Scratch:
    """Memory for up to `rows` rows of `heads` query heads of `dim` numbers; what it holds does not matter."""
    shape = rows, heads, PARTS
    return Scratch(torch.empty(*shape, dim, device=device), torch.empty(*shape, 2, device=device))


def split_keys(head_dim: int, dtype: torch.dtype) -> int:
    """Keys of a split, of which a part takes one, passes over those of the other parts, and takes the next."""
    if dtype.itemsize > 2:
        return 16
    return 32 if head_dim > 128 else 64


def decode(
    pool: torch.Tensor,
    layer: int,
    query: torch.Tensor,
    tables: torch.Tensor,
    lengths: torch.Tensor,
    out: torch.Tensor,
    scratch: Scratch,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> None:
    """Attend with query [row, head, head_dim], row i over the first lengths[i] keys of the blocks tables[i].

    lengths int32 [row] count the row's own key, which the pool already holds; where it is 0 the row is padding, and
    zeros in `out`. tables int32 [row, block]. All else is as for `attention.attend`. Nothing is allocated, and nothing
    but the tensors' shapes is read on the host: a CUDA graph can hold it.
    """
    need_attention(pool, query, out, tables, sinks)
    rows, heads, dim = query.shape
    kv_heads, block_size = pool.shape[3:5]
    group = heads // kv_heads
    need(lengths.dtype == torch.int32 and lengths.shape == (rows,), "lengths are int32 [row]")
    need(lengths.is_contiguous(), "lengths lie together")
    need(tables.shape[0] == rows, "there is a table for every row")
    need(scratch.sums.shape[0] >= rows and scratch.sums.shape[1:] == (heads, PARTS, dim), "the scratch is large enough")
    if rows == 0:
        return
    scale, cap = powers(scale, softcap)
    fixed = {"HEADS": heads, "HEAD_DIM": dim, "WINDOWED": window is not None, "PARTS": PARTS, "BLOCK_D": padded(dim)}
    split, block_m = split_keys(dim, pool.dtype), max(16, triton.next_power_of_2(group))
    _decode[rows, kv_heads, PARTS](
        pool, query, tables, lengths, *scratch, layer, tables.stride(0), window or 0, scale, cap, *pool.stride()[:5],
        *strides(query), GROUP=group, BLOCK_SIZE=block_size, CAPPED=softcap is not None, SPLIT=split, BLOCK_M=block_m,
        num_warps=8 if block_m > 32 else 4, num_stages=_STAGES, enable_fp_fusion=True, **fixed,
    )  # fmt: skip
    _combine[rows, heads](
        lengths, *scratch, sinks, out, window or 0, *strides(out), SPLIT=split,
        num_warps=4, enable_fp_fusion=True, **fixed,
    )  # fmt: skip


@triton.jit(  # type: ignore[untyped-decorator]
    do_not_specialize=["layer", "table_stride", "window"],
    do_not_specialize_on_alignment=["tables", "lengths"],
)
def _decode(
    pool: tensor, query: tensor, tables: tensor, lengths: tensor, sums: tensor, stats: tensor,
    layer: tensor, table_stride: tensor, window: tensor, scale: tensor, cap: tensor,
    stride_block: tensor, stride_layer: tensor, stride_kind: tensor, stride_head: tensor, stride_slot: tensor,
    query_row: tensor, query_head: tensor,
    GROUP: tl.constexpr, BLOCK_SIZE: tl.constexpr, CAPPED: tl.constexpr, SPLIT: tl.constexpr, BLOCK_M: tl.constexpr,
    HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, WINDOWED: tl.constexpr, PARTS: tl.constexpr, BLOCK_D: tl.constexpr,
) -> None:  # fmt: skip
    row, kv_head, part = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    length = tl.load(lengths + row)
    first = length * 0
    if WINDOWED:
        first = tl.maximum(length - window, 0)
    begin = (first // SPLIT + part) * SPLIT
    if begin >= length:
        return
    line = tl.arange(0, BLOCK_M)
    head = kv_head * GROUP + line
    number = tl.arange(0, BLOCK_D)
    own = (line < GROUP)[:, None] & (number < HEAD_DIM)[None, :]
    q = tl.load(query + row * query_row + (head * query_head)[:, None] + number[None, :], mask=own, other=0.0)
    peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    table = tables + row * table_stride
    place = pool + layer.to(tl.int64) * stride_layer + kv_head * stride_head
    for base in range(begin, length, PARTS * SPLIT):
        keys = base + tl.arange(0, SPLIT)
        stored = (keys >= first) & (keys < length)
        peak, total, acc = absorb(
            q, peak, total, acc, place, table, keys, stored, stored[None, :], scale, cap,
            stride_block, stride_kind, stride_slot, HEAD_DIM, BLOCK_SIZE, CAPPED, BLOCK_D,
        )  # fmt: skip
    place_of = (row * HEADS + head) * PARTS + part
    tl.store(sums + (place_of * HEAD_DIM)[:, None] + number[None, :], acc, mask=own)
    tl.store(stats + place_of * 2, peak, mask=line < GROUP)
    tl.store(stats + place_of * 2 + 1, total, mask=line < GROUP)


@triton.jit(  # type: ignore[untyped-decorator]
    do_not_specialize=["window"],
    do_not_specialize_on_alignment=["lengths", "sinks"],
)
def _combine(
    lengths: tensor, sums: tensor, stats: tensor, sinks: tensor, out: tensor,
    window: tensor, out_row: tensor, out_head: tensor,
    SPLIT: tl.constexpr, HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
    WINDOWED: tl.constexpr, PARTS: tl.constexpr, BLOCK_D: tl.constexpr,
) -> None:  # fmt: skip
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    length = tl.load(lengths + row)
    first = length * 0
    if WINDOWED:
        first = tl.maximum(length - window, 0)
    part, number = tl.arange(0, PARTS), tl.arange(0, BLOCK_D)
    # Parts that had no split wrote nothing: what stands there is of another step.
    wrote = (first // SPLIT + part) * SPLIT < length
    place = (row * HEADS + head) * PARTS + part
    peaks = tl.load(stats + place * 2, mask=wrote, other=float("-inf"))
    totals = tl.load(stats + place * 2 + 1, mask=wrote, other=0.0)
    own = wrote[:, None] & (number < HEAD_DIM)[None, :]
    parts = tl.load(sums + (place * HEAD_DIM)[:, None] + number[None, :], mask=own, other=0.0)
    peak = tl.max(peaks, 0)
    if sinks is not None:
        sink = tl.load(sinks + head) * LOG2_E
        peak = tl.maximum(peak, sink)
    base = tl.where(peak == float("-inf"), 0.0, peak)
    weights = tl.exp2(peaks - base)
    total = tl.sum(weights * totals, 0)
    if sinks is not None:
        total += tl.exp2(sink - base)
    result = tl.sum(weights[:, None] * parts, 0) / tl.where(total == 0.0, 1.0, total)
    tl.store(out + row * out_row + head * out_head + number, result.to(out.dtype.element_ty), mask=number < HEAD_DIM)
