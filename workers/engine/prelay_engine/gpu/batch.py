"""Attention of one step on a GPU: new keys into the pool, then the kernels over it."""

from __future__ import annotations

import torch

from ..attention import Form
from .inputs import Inputs
from .kernels.attention import attend
from .kernels.decode import Scratch, decode
from .kernels.tiles import Shape
from .kernels.write_kv import write_kv


class Sinks:
    """Each layer's sinks as the kernels want them, made once: they are weights."""

    def __init__(self) -> None:
        self._wide: dict[int, torch.Tensor] = {}

    def of(self, layer: int, sinks: torch.Tensor | None) -> torch.Tensor | None:
        """float32 [head]."""
        if sinks is None:
            return None
        if layer not in self._wide:
            self._wide[layer] = sinks.detach().float().contiguous()
        return self._wide[layer]


class GpuBatch:
    """One step's rows over `pool` [block, layer, 2, kv_head, slot, head_dim]; every attention layer calls `attend`.

    With `exact` all rows go through the kernel of tiles, of one size, whose bits do not depend on a row's neighbours.
    """

    def __init__(self, pool: torch.Tensor, inputs: Inputs, scratch: Scratch, sinks: Sinks, *, exact: bool) -> None:
        self._pool, self._inputs, self._scratch, self._sinks, self._exact = pool, inputs, scratch, sinks, exact

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        form: Form,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Store the new keys and values and attend: query [1, head, row, dim] → [1, row, head, dim]."""
        given, pool, singles = self._inputs, self._pool, self._inputs.singles
        rows, keys, values = (_by_row(x) for x in (query, key, value))
        out = torch.empty(rows.shape, dtype=rows.dtype, device=rows.device)
        sink = self._sinks.of(layer, sinks)
        write_kv(pool, layer, keys, values, given.slots)
        if singles:
            tables = given.tables[:singles]
            decode(
                pool, layer, rows[:singles], tables, given.lengths, out[:singles], self._scratch,
                scale=form.scale, window=form.window, softcap=form.softcap, sinks=sink,
            )  # fmt: skip
        if given.tiles:
            group = query.shape[1] // key.shape[1]
            shape = Shape.of(query.shape[3], pool.dtype, group, self._exact)
            attend(
                pool, layer, rows, given.tiles[shape.rows(group)], given.tables, out, scale=form.scale,
                window=form.window, softcap=form.softcap, sinks=sink, exact=self._exact,
            )  # fmt: skip
        return out.unsqueeze(0)


def _by_row(x: torch.Tensor) -> torch.Tensor:
    """[1, head, row, dim] → [row, head, dim], the numbers of a head side by side."""
    rows = x[0].transpose(0, 1)
    return rows if rows.stride(-1) == 1 else rows.contiguous()
