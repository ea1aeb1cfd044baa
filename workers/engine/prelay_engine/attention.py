"""Attention over the KV store, done so that a row's bits do not depend on what is computed beside it.

The rules:
- The query heads that share a key head are folded into the length: [1, kv_head, rows · group, head_dim], padded to
  a multiple of 4 rows, because the kernel sums a remainder of 1 to 3 rows differently.
- The range of keys is a function of the row's block of POSITION_BLOCK positions only, masked beyond the
  row, and one call never spans two of those blocks.
- There is always a mask, so that all rows go one way through the kernel.
- Where scores are capped no such kernel exists, and a plain product depends on its shape: there every call has one
  and the same shape, that of a tile of few positions, and a row's place in its tile is that of its position.
Buffers are finite beyond the last position (see `Cursor.read`): a masked NaN would still be a NaN.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch.nn.functional import pad, scaled_dot_product_attention

from . import kernels
from .config import POSITION_BLOCK
from .kv import Cursor, KvStore
from .masks import MaskCache, Masks, key_range
from .native.lib import Kernels, Spans

#: Folded rows that a tile of capped scores has at least: fewer waste the kernel, more waste a decoding row.
_TILE_ROWS = 8


@dataclass(frozen=True, slots=True)
class Form:
    """What a layer's attention is: score = query · key · scale, then capped; over the last `window` positions."""

    scale: float
    window: int | None = None
    softcap: float | None = None


@dataclass(frozen=True, slots=True)
class Span:
    """The rows of one sequence in a step: positions [start, start + length)."""

    key: str
    start: int
    length: int


@dataclass(slots=True)
class _Piece:
    """Rows [row, row + count) of the step, which lie in one block of positions, or in one tile of a block."""

    row: int
    count: int
    keys: slice  # within what the cursor reads
    mask: torch.Tensor
    place: int  # of the first row among those that the mask is for


@dataclass(slots=True)
class _Work:
    """What the layers with one and the same window do in one step, capped ones apart."""

    cursors: list[Cursor] = field(default_factory=list)  # of single rows, from row 0
    masks: list[torch.Tensor] = field(default_factory=list)
    chunks: list[tuple[Cursor, slice, list[_Piece]]] = field(default_factory=list)


class Batch:
    """One step's rows. `spans` are in the order of the rows; spans of one row (decoding sequences) come first.

    It travels through the model's forward to every attention layer, which calls `attend`.
    """

    def __init__(self, store: KvStore, spans: Sequence[Span], masks: MaskCache, kernels: Kernels | None = None) -> None:
        self.spans = tuple(spans)
        self.rows = sum(span.length for span in spans)
        self._store = store
        self._masks = masks
        self._work: dict[tuple[int | None, bool], _Work] = {}
        self._kernels = kernels
        self._places = None if kernels is None else Spans([(s.start, s.length, store.place(s.key)) for s in spans])

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        form: Form,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Store the new keys and values and attend: query [1, head, rows, dim] → [1, rows, head, dim].

        `sinks` [head] are scores of one more key of no value. Rows beyond the batch's own are padding and come
        back as zeros.
        """
        if self._kernels is not None and self._places is not None:
            return self._kernels.attend(
                self._places, layer, *(_dense(x[0]) for x in (query, key, value)), scale=form.scale, window=form.window,
                softcap=form.softcap, sinks=None if sinks is None else sinks.float(),
            ).unsqueeze(0)  # fmt: skip
        heads, rows, dim = query.shape[1:]
        kv_heads = key.shape[1]
        group = heads // kv_heads
        like = form.window, form.softcap is not None
        if like not in self._work:
            self._work[like] = self._plan(form, group, query.dtype)
        work = self._work[like]
        sinks = None if sinks is None else sinks.view(kv_heads, group)
        kv = torch.stack((key[0], value[0]))  # [2, kv_head, rows, dim]
        folded = query[0].unflatten(0, (kv_heads, group)).permute(2, 0, 1, 3)  # [rows, kv_head, group, dim]
        parts = _attend_single(layer, work, folded, kv, form, sinks)
        for cursor, span, pieces in work.chunks:
            cursor.write(layer, kv[:, :, span])
            keys, values = cursor.read(layer)
            parts += [_attend_piece(piece, folded, keys, values, form, sinks) for piece in pieces]
        if rows > self.rows:
            parts.append(query.new_zeros(rows - self.rows, kv_heads, group, dim))
        return torch.cat(parts).reshape(1, rows, heads, dim)

    def _plan(self, form: Form, group: int, dtype: torch.dtype) -> _Work:
        tile = _tile(group) if form.softcap is not None else 0
        masks, work, row = self._masks.get(form.window, torch.float32 if tile else dtype), _Work(), 0
        for span in self.spans:
            first, stop = key_range(span.start, form.window)[0], key_range(span.start + span.length - 1, form.window)[1]
            cursor = self._store.cursor(span.key, span.start, span.length, first, stop)
            if span.length == 1 and not work.chunks and not tile:
                work.cursors.append(cursor)
                work.masks.append(masks.row(span.start))
            else:
                pieces = _pieces(span, row, first, masks, group, tile)
                work.chunks.append((cursor, slice(row, row + span.length), pieces))
            row += span.length
        return work


def _dense(x: torch.Tensor) -> torch.Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _tile(group: int) -> int:
    """Positions of a tile: a power of two, so that blocks hold whole tiles."""
    positions = 1
    while positions * group < _TILE_ROWS:
        positions *= 2
    return positions


def _pieces(span: Span, row: int, base: int, masks: Masks, group: int, tile: int) -> list[_Piece]:
    pieces, start, end, size = [], span.start, span.start + span.length, tile or POSITION_BLOCK
    while start < end:
        first, stop = key_range(start, masks.window)
        count = min(end - start, size - start % size)
        place = start % tile if tile else 0
        mask = masks.rows(start - place, tile or count, group)
        pieces.append(_Piece(row + start - span.start, count, slice(first - base, stop - base), mask, place))
        start += count
    return pieces


def _attend_single(
    layer: int, work: _Work, folded: torch.Tensor, kv: torch.Tensor, form: Form, sinks: torch.Tensor | None
) -> list[torch.Tensor]:
    """One call a sequence: to share a call would mean to copy their keys together, which costs more."""
    count, group = len(work.cursors), folded.shape[2]
    if not count:
        return []
    queries = pad(folded[:count], (0, 0, 0, -group % 4)).unsqueeze(1)
    outs, sums = [], []
    new = kv[:, :, :count].permute(2, 0, 1, 3).unsqueeze(3)  # [row, 2, kv_head, 1, dim]
    for cursor, mask, query, row in zip(work.cursors, work.masks, queries.unbind(0), new.unbind(0), strict=True):
        cursor.write(layer, row)
        keys, values = cursor.read(layer)
        if sinks is None:
            outs.append(scaled_dot_product_attention(query, keys, values, attn_mask=mask, scale=form.scale))
        else:
            out, log_sum = kernels.with_sum(query, keys, values, mask, form.scale)
            outs.append(out)
            sums.append(log_sum)
    out = torch.cat(outs)[:, :, :group]
    return [out if sinks is None else kernels.beside_sink(out, torch.cat(sums)[:, :, :group], sinks)]


def _attend_piece(
    piece: _Piece,
    folded: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    form: Form,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    rows, kv_heads, group, dim = folded[piece.row : piece.row + piece.count].shape
    query = folded[piece.row : piece.row + piece.count].permute(1, 0, 2, 3).reshape(1, kv_heads, rows * group, dim)
    before = piece.place * group
    query = pad(query, (0, 0, before, piece.mask.shape[2] - before - rows * group))
    keys, values = keys[:, :, piece.keys], values[:, :, piece.keys]
    log_sum = None
    if form.softcap is not None:
        out, log_sum = kernels.capped(query, keys, values, piece.mask, form.scale, form.softcap)
    elif sinks is not None:
        out, log_sum = kernels.with_sum(query, keys, values, piece.mask, form.scale)
    else:
        out = scaled_dot_product_attention(query, keys, values, attn_mask=piece.mask, scale=form.scale)
    own = slice(before, before + rows * group)
    out = out[0, :, own].view(kv_heads, rows, group, dim).transpose(0, 1)
    if sinks is None or log_sum is None:
        return out
    return kernels.beside_sink(out, log_sum[0, :, own].view(kv_heads, rows, group).transpose(0, 1), sinks)
