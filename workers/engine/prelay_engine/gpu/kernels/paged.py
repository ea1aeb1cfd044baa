"""What attention kernels share: one tile of keys and values of a paged pool, taken into running sums."""

from __future__ import annotations

from math import e, log2

import torch
import triton
import triton.language as tl
from triton.language import tensor

LOG2_E = tl.constexpr(log2(e))


def powers(scale: float, softcap: float | None) -> tuple[float, float]:
    """What `absorb` takes as scale and cap, for scores of query · key · scale that are capped to ±softcap."""
    if softcap is None:
        return scale * log2(e), 0.0
    return scale / softcap, softcap * log2(e)


def padded(head_dim: int) -> int:
    """Numbers of a head in registers: a power of two, and no fewer than tl.dot multiplies."""
    return max(16, int(triton.next_power_of_2(head_dim)))


def need(fits: bool, what: str) -> None:
    """ValueError unless it `fits`: a kernel would write or read where it must not."""
    if not fits:
        raise ValueError(f"a kernel was called with what does not fit: {what}")


def strides(rows: torch.Tensor) -> tuple[int, int]:
    """From one row, and from one head, of [row, head, dim] to the next.

    torch lets the stride of a single row be anything; to compile a kernel anew for each would be a waste.
    """
    count, heads, dim = rows.shape
    return heads * dim if count == 1 else rows.stride(0), dim if heads == 1 else rows.stride(1)


def need_attention(
    pool: torch.Tensor, query: torch.Tensor, out: torch.Tensor, tables: torch.Tensor, sinks: torch.Tensor | None
) -> None:
    """ValueError unless these are as `attend` and `decode` say."""
    heads, dim = query.shape[1:]
    need(query.dtype == out.dtype == pool.dtype, "query and out are of the pool's dtype")
    need(out.shape == query.shape and pool.shape[5] == dim and heads % pool.shape[3] == 0, "[row, head, head_dim]")
    need(query.stride(2) == out.stride(2) == pool.stride(5) == 1, "the numbers of a head lie together")
    need(tables.dtype == torch.int32 and tables.stride(1) == 1, "tables are int32 [sequence, block]")
    if sinks is not None:
        fits = sinks.dtype == torch.float32 and sinks.shape == (heads,) and sinks.is_contiguous()
        need(fits, "sinks are float32 [head]")


@triton.jit  # type: ignore[untyped-decorator]
def absorb(
    query: tensor, peak: tensor, total: tensor, acc: tensor, place: tensor, table: tensor,
    keys: tensor, stored: tensor, seen: tensor, scale: tensor, cap: tensor,
    stride_block: tensor, stride_kind: tensor, stride_slot: tensor,
    HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, CAPPED: tl.constexpr, BLOCK_D: tl.constexpr,
) -> tensor:  # fmt: skip
    """Take the `keys` [N] (positions) into peak [M], total [M] and acc [M, D]; give these three back.

    query [M, D]; `place`: where this layer's and head's part of block 0 begins; `table`: the sequence's blocks; stored
    [N]: which of the keys may be read; seen [M or 1, N]: which of these a row of the query attends to. Scores are in
    powers of two: `scale` and, where CAPPED, `cap` bring them there. A row that sees none keeps its bits.
    """
    number = tl.arange(0, BLOCK_D)
    block = tl.load(table + keys // BLOCK_SIZE, mask=stored, other=0).to(tl.int64)
    slot = place + block * stride_block + (keys % BLOCK_SIZE) * stride_slot
    # What is not read is 0 and not whatever lies there: memory once used may hold a NaN, and 0 · NaN is NaN.
    key_mask, value_mask = stored[None, :], stored[:, None]
    if HEAD_DIM < BLOCK_D:
        key_mask = key_mask & (number < HEAD_DIM)[:, None]
        value_mask = value_mask & (number < HEAD_DIM)[None, :]
    key = tl.load(slot[None, :] + number[:, None], mask=key_mask, other=0.0)
    score = tl.dot(query, key, input_precision="ieee") * scale
    if CAPPED:
        # tanh. Far from 0 the power is 0 or infinite, and the quotient 2 or 0.
        score = cap * (1.0 - 2.0 / (tl.exp2(score * (2.0 * LOG2_E)) + 1.0))
    score = tl.where(seen, score, float("-inf"))
    higher = tl.maximum(peak, tl.max(score, 1))
    # A row that has seen nothing so far: -inf - -inf would be NaN.
    base = tl.where(higher == float("-inf"), 0.0, higher)
    share = tl.exp2(score - base[:, None])
    fade = tl.exp2(peak - base)
    total = total * fade + tl.sum(share, 1)
    value = tl.load(slot[:, None] + stride_kind + number[None, :], mask=value_mask, other=0.0)
    acc = tl.dot(share.to(value.dtype), value, acc * fade[:, None], input_precision="ieee")
    return higher, total, acc
