"""Causal attention over the paged pool, for rows of prompts, of chunks with keys before them, and single ones alike."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language import tensor

from .paged import LOG2_E, absorb, need, need_attention, padded, powers, strides
from .tiles import Shape, Tiles


def attend(
    pool: torch.Tensor,
    layer: int,
    query: torch.Tensor,
    tiles: Tiles,
    tables: torch.Tensor,
    out: torch.Tensor,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    exact: bool = False,
) -> None:
    """Attend with query [row, head, head_dim] to the keys that the pool already holds, the rows' own among them.

    pool [block, layer, 2, kv_head, slot, head_dim]; tables int32 [sequence, block] the blocks of each sequence; `tiles`
    of Shape.of(..., exact).rows(group) rows, on the pool's device; out like query, in which rows of no tile are left
    as they are. Scores are query · key · scale, capped to ±softcap by tanh, over the last `window` positions; sinks
    float32 [head] are scores of one more key of no value. The dtype is the pool's. ValueError where shapes or dtypes do
    not fit.

    Keys are walked from a multiple of the tile's size on, and what a row does not see changes no bit of it: with one
    and the same `exact` a row comes out the same alone, among others and in any chunk.
    """
    need_attention(pool, query, out, tables, sinks)
    heads, dim = query.shape[1:]
    kv_heads, block_size = pool.shape[3:5]
    group = heads // kv_heads
    shape = Shape.of(dim, pool.dtype, group, exact)
    need(tiles.rows == shape.rows(group) and tiles.table.dtype == torch.int32, "tiles have the shape's rows")
    need(tiles.table.is_contiguous(), "tiles lie together")
    if len(tiles) == 0:
        return
    scale, cap = powers(scale, softcap)
    _attend[len(tiles), kv_heads](
        pool, query, out, tiles.table, tables, sinks, layer, tables.stride(0), window or 0, scale, cap,
        *pool.stride()[:5], *strides(query), *strides(out), GROUP=group, HEAD_DIM=dim, BLOCK_SIZE=block_size,
        WINDOWED=window is not None, CAPPED=softcap is not None, BLOCK_M=shape.block_m, BLOCK_N=shape.block_n,
        BLOCK_D=padded(dim), num_warps=shape.warps, num_stages=shape.stages, enable_fp_fusion=True,
    )  # fmt: skip


@triton.jit(  # type: ignore[untyped-decorator]
    do_not_specialize=["layer", "table_stride", "window"],
    do_not_specialize_on_alignment=["tiles", "tables", "sinks"],
)
def _attend(
    pool: tensor, query: tensor, out: tensor, tiles: tensor, tables: tensor, sinks: tensor,
    layer: tensor, table_stride: tensor, window: tensor, scale: tensor, cap: tensor,
    stride_block: tensor, stride_layer: tensor, stride_kind: tensor, stride_head: tensor, stride_slot: tensor,
    query_row: tensor, query_head: tensor, out_row: tensor, out_head: tensor,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, WINDOWED: tl.constexpr, CAPPED: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
) -> None:  # fmt: skip
    tile = tiles + tl.program_id(0).to(tl.int64) * 4
    sequence, first_row, rows, position = tl.load(tile), tl.load(tile + 1), tl.load(tile + 2), tl.load(tile + 3)
    kv_head = tl.program_id(1)
    # Line m of the tile is of row m // GROUP and the query head m % GROUP of those that share the key head.
    line = tl.arange(0, BLOCK_M)
    row, head = first_row.to(tl.int64) + line // GROUP, kv_head * GROUP + line % GROUP
    number = tl.arange(0, BLOCK_D)
    own = (line // GROUP < rows)[:, None] & (number < HEAD_DIM)[None, :]
    q = tl.load(query + (row * query_row + head * query_head)[:, None] + number[None, :], mask=own, other=0.0)
    peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    newest = position + line // GROUP
    oldest = newest * 0
    first = position * 0
    if WINDOWED:
        oldest = newest - window + 1
        first = tl.maximum(position - window + 1, 0)
    stop = tl.where(sequence < 0, 0, position + rows)
    table = tables + tl.maximum(sequence, 0).to(tl.int64) * table_stride
    place = pool + layer.to(tl.int64) * stride_layer + kv_head * stride_head
    for base in range(first // BLOCK_N * BLOCK_N, stop, BLOCK_N):
        keys = base + tl.arange(0, BLOCK_N)
        stored = (keys >= first) & (keys < stop)
        seen = (keys[None, :] <= newest[:, None]) & (keys[None, :] >= oldest[:, None])
        peak, total, acc = absorb(
            q, peak, total, acc, place, table, keys, stored, seen, scale, cap, stride_block, stride_kind, stride_slot,
            HEAD_DIM, BLOCK_SIZE, CAPPED, BLOCK_D,
        )  # fmt: skip
    if sinks is not None:
        sink = tl.load(sinks + head, mask=line < rows * GROUP, other=0.0) * LOG2_E
        higher = tl.maximum(peak, sink)
        base = tl.where(higher == float("-inf"), 0.0, higher)
        fade = tl.exp2(peak - base)
        total = total * fade + tl.exp2(sink - base)
        acc = acc * fade[:, None]
    # Padding has seen nothing: 0 / 0.
    result = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    to = out + (row * out_row + head * out_head)[:, None] + number[None, :]
    tl.store(to, result.to(out.dtype.element_ty), mask=own)
