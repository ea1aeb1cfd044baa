"""The activation between a gated feed-forward layer's two products."""

from __future__ import annotations

from typing import Literal

import torch
import triton
import triton.language as tl
from triton.language import tensor

Name = Literal["silu", "gelu", "gelu_tanh"]

_TILE = 1024


def silu_mul(gate_up: torch.Tensor, activation: Name = "silu") -> torch.Tensor:
    """activation(gate) · up of gate_up [rows, 2 · width], the gate first → [rows, width] in its dtype.

    float32, float16 or bfloat16, the last dimension contiguous. The activation is computed in float32 and rounded
    before it is multiplied, as two modules would do it. `gelu` is the exact one, by erf.
    """
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    assert gate_up.shape == (rows, 2 * width)
    assert gate_up.stride(1) == 1
    out = torch.empty(rows, width, dtype=gate_up.dtype, device=gate_up.device)
    if rows:
        stride = gate_up.stride(0) if rows > 1 else 2 * width
        _gated[rows, triton.cdiv(width, _TILE)](
            gate_up, out, width, stride, ACTIVATION=activation, TILE=_TILE, num_warps=4, enable_fp_fusion=False
        )
    return out


@triton.jit  # type: ignore[untyped-decorator]
def _gated(
    gate_up: tensor, out: tensor, width: tensor, stride: tensor, ACTIVATION: tl.constexpr, TILE: tl.constexpr
) -> None:
    row = tl.program_id(0).to(tl.int64)
    number = tl.program_id(1) * TILE + tl.arange(0, TILE)
    real = number < width
    gate = tl.load(gate_up + row * stride + number, mask=real, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * stride + width + number, mask=real, other=0.0)
    if ACTIVATION == "silu":
        gate = gate / (1.0 + _exp(-gate))
    elif ACTIVATION == "gelu":
        gate = (tl.erf(gate * 0.7071067811865476) + 1.0) * gate * 0.5
    else:
        # (1 + tanh(t)) / 2 = 1 / (1 + e^-2t), with t = sqrt(2 / π) · (x + 0.044715 x³)
        gate = gate / (1.0 + _exp((gate * gate * 0.044715 + 1.0) * gate * -1.5957691216057308))
    gate = gate.to(out.dtype.element_ty).to(tl.float32)
    tl.store(out + row * width + number, (gate * up.to(tl.float32)).to(out.dtype.element_ty), mask=real)


@triton.jit  # type: ignore[untyped-decorator]
def _exp(x: tensor) -> tensor:
    """e^x, and never infinite: what it divides is 0 for all purposes long before."""
    return tl.exp(tl.minimum(x, 88.0))
