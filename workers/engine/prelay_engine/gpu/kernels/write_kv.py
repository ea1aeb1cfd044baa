"""Keys and values of new rows into the paged pool."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language import tensor

from .paged import need, strides

#: Numbers of keys that one program holds in registers, and as many of values.
_HELD = 4096


def write_kv(pool: torch.Tensor, layer: int, keys: torch.Tensor, values: torch.Tensor, slots: torch.Tensor) -> None:
    """Store keys and values [row, kv_head, head_dim] of one layer in pool [block, layer, 2, kv_head, slot, head_dim].

    slots int64 [row]: block · block_size + slot in the block; nothing is written for a row whose slot is negative. No
    two rows may have the same. The dtype is the pool's. ValueError where shapes or dtypes do not fit.
    """
    rows, kv_heads, dim = keys.shape
    need(keys.dtype == values.dtype == pool.dtype, "keys and values are of the pool's dtype")
    need(values.shape == keys.shape and pool.shape[3] == kv_heads and pool.shape[5] == dim, "[row, kv_head, head_dim]")
    need(keys.stride(2) == values.stride(2) == pool.stride(5) == 1, "the numbers of a head lie together")
    need(slots.dtype == torch.int64 and slots.shape == (rows,) and slots.is_contiguous(), "slots are int64 [row]")
    if rows == 0:
        return
    block_d = triton.next_power_of_2(dim)
    heads = min(triton.next_power_of_2(kv_heads), max(1, _HELD // block_d))
    _write_kv[rows, triton.cdiv(kv_heads, heads)](
        pool, keys, values, slots, layer, *pool.stride()[:5], *strides(keys), *strides(values),
        KV_HEADS=kv_heads, HEAD_DIM=dim, BLOCK_SIZE=pool.shape[4], HEADS=heads, BLOCK_D=block_d,
        num_warps=4, enable_fp_fusion=True,
    )  # fmt: skip


@triton.jit(do_not_specialize=["layer"], do_not_specialize_on_alignment=["slots"])  # type: ignore[untyped-decorator]
def _write_kv(
    pool: tensor, keys: tensor, values: tensor, slots: tensor, layer: tensor,
    stride_block: tensor, stride_layer: tensor, stride_kind: tensor, stride_head: tensor, stride_slot: tensor,
    key_row: tensor, key_head: tensor, value_row: tensor, value_head: tensor,
    KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    HEADS: tl.constexpr, BLOCK_D: tl.constexpr,
) -> None:  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row)
    if slot < 0:
        return
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]
    number = tl.arange(0, BLOCK_D)[None, :]
    own = (head < KV_HEADS) & (number < HEAD_DIM)
    key = tl.load(keys + row * key_row + head * key_head + number, mask=own)
    value = tl.load(values + row * value_row + head * value_head + number, mask=own)
    to = pool + slot // BLOCK_SIZE * stride_block + slot % BLOCK_SIZE * stride_slot + layer.to(tl.int64) * stride_layer
    to += head * stride_head + number
    tl.store(to, key, mask=own)
    tl.store(to + stride_kind, value, mask=own)
