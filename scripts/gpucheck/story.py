"""Texts whose keys and values lie in a paged pool, and what attention over them comes to by its definition."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from prelay_engine.gpu.kernels.attention import attend
from prelay_engine.gpu.kernels.decode import decode, scratch
from prelay_engine.gpu.kernels.tiles import Shape, Tiles, tiles

from .rig import Rig

_LAYERS, _LAYER = 3, 1
_SCALE = 0.11
#: What stands in `out` before a kernel runs: no result is anywhere near.
_POISON = 1e4


@dataclass(frozen=True, slots=True)
class Form:
    """How scores are made, and whether there are sinks."""

    window: int | None = None
    softcap: float | None = None
    sinks: bool = False

    def options(self, heads: int, device: torch.device) -> dict[str, Any]:
        sinks = torch.linspace(-2.0, 3.0, heads, device=device) if self.sinks else None
        return {"scale": _SCALE, "window": self.window, "softcap": self.softcap, "sinks": sinks}


@dataclass(frozen=True, slots=True)
class Heads:
    """What a model's attention is like."""

    dtype: torch.dtype
    dim: int
    group: int
    block_size: int = 16
    kv_heads: int = 2

    @property
    def count(self) -> int:
        return self.kv_heads * self.group


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows of one text: positions [start, start + length)."""

    text: int
    start: int
    length: int


class Story:
    """Texts of `lengths` tokens in one layer of a pool. All else in it is NaN, and room in tables names no block."""

    def __init__(self, rig: Rig, heads: Heads, lengths: Sequence[int]) -> None:
        self._rig, self.heads = rig, heads
        size, device = heads.block_size, rig.device
        counts = [-(-length // size) for length in lengths]
        shape = (sum(counts) + 1, _LAYERS, 2, heads.kv_heads, size, heads.dim)
        self._pool = torch.full(shape, float("nan"), dtype=heads.dtype, device=device)
        self._tables = torch.full((len(lengths), max(counts) + 2), 2**30, dtype=torch.int32, device=device)
        blocks = torch.randperm(sum(counts) + 1, generator=rig.dice(sum(lengths)), device=device).to(torch.int32)
        self._packed = []  # [token, head, dim]: queries, keys, values
        for text, (count, length) in enumerate(zip(counts, lengths, strict=True)):
            own, blocks = blocks[:count], blocks[count:]
            self._tables[text, :count] = own
            packed = rig.randn(length, heads.count + 2 * heads.kv_heads, heads.dim, seed=text, dtype=heads.dtype)
            self._packed.append(packed)
            place = torch.arange(length, device=device)
            for kind, part in enumerate(packed.split([heads.count, heads.kv_heads, heads.kv_heads], 1)[1:]):
                self._pool[own[place // size].long(), _LAYER, kind, :, place % size] = part

    def attended(
        self, rows: Sequence[Rows], form: Form, *, exact: bool, padding: int = 0, laid: Tiles | None = None
    ) -> torch.Tensor:
        """What `attend` gives: [row + padding, head, dim]."""
        heads, shape = self.heads, Shape.of(self.heads.dim, self.heads.dtype, self.heads.group, exact)
        query = torch.cat([self._queries(each.text)[each.start : each.start + each.length] for each in rows])
        empty = query.new_full((padding, *query.shape[1:]), float("nan"))
        query, size = torch.cat((query, empty)), shape.rows(heads.group)
        if laid is None:
            laid = tiles([(each.start, each.length) for each in rows], size, len(query))
        out = torch.full_like(query, _POISON)
        tables = self._tables[[each.text for each in rows]]
        options = form.options(heads.count, self._rig.device)
        attend(self._pool, _LAYER, query, laid.to(self._rig.device), tables, out, exact=exact, **options)
        return out

    def decoded(self, rows: Sequence[tuple[int, int]], form: Form) -> torch.Tensor:
        """What `decode` gives for rows of (text, keys that it sees); one without keys is padding."""
        heads, device = self.heads, self._rig.device
        query = torch.stack([self._queries(text)[max(0, length - 1)] for text, length in rows])
        out, work = torch.full_like(query, _POISON), scratch(len(rows) + 1, heads.count, heads.dim, device)
        for memory in work:
            memory.fill_(float("nan"))
        lengths = torch.tensor([length for _, length in rows], dtype=torch.int32, device=device)
        tables = self._tables[[text for text, _ in rows]]
        decode(self._pool, _LAYER, query, tables, lengths, out, work, **form.options(heads.count, device))
        return out

    def expected(self, rows: Rows, form: Form) -> torch.Tensor:
        """What rows come to by the definition and in float64: [row, head, dim]."""
        heads, stop = self.heads, rows.start + rows.length
        parts = self._packed[rows.text][:stop].double().split([heads.count, heads.kv_heads, heads.kv_heads], 1)
        query = parts[0][rows.start :].unflatten(1, (heads.kv_heads, heads.group))
        options = form.options(heads.count, self._rig.device)
        scores = torch.einsum("rhgd,nhd->rhgn", query, parts[1]) * _SCALE
        if form.softcap is not None:
            scores = form.softcap * torch.tanh(scores / form.softcap)
        place = torch.arange(stop, device=self._rig.device)
        distance = place[rows.start :, None] - place
        seen = (distance >= 0) & (distance < (form.window or stop))
        scores = scores.masked_fill(~seen[:, None, None], float("-inf"))
        values = parts[2]
        if form.sinks:
            sinks = options["sinks"].double().view(1, heads.kv_heads, heads.group, 1)
            scores = torch.cat((scores, sinks.expand(len(scores), -1, -1, 1)), 3)
            values = torch.cat((values, torch.zeros_like(values[:1])))
        return torch.einsum("rhgn,nhd->rhgd", scores.softmax(-1), values).flatten(1, 2)

    def _queries(self, text: int) -> torch.Tensor:
        return self._packed[text][:, : self.heads.count]
