"""Attention over the KV store, done so that a row's bits do not depend on what is computed beside it.

The rules:
- The query heads that share a key head are folded into the length: [1, kv_head, rows · group, head_dim], padded to
  a multiple of 4 rows, because the kernel sums a remainder of 1 to 3 rows differently.
- The range of keys is a function of the row's block of POSITION_BLOCK positions only, masked beyond the
  row, and one call never spans two of those blocks.
- There is always a mask, so that all rows go one way through the kernel.
Buffers are finite beyond the last position (see `Cursor.read`): a masked NaN would still be a NaN.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch.nn.functional import pad, scaled_dot_product_attention

from .config import POSITION_BLOCK
from .kv import Cursor, KvStore
from .masks import MaskCache, Masks, key_range


@dataclass(frozen=True, slots=True)
class Span:
    """The rows of one sequence in a step: positions [start, start + length)."""

    key: str
    start: int
    length: int


@dataclass(slots=True)
class _Piece:
    """Rows [row, row + count) of the step, which lie in one block of positions."""

    row: int
    count: int
    keys: slice  # within what the cursor reads
    mask: torch.Tensor


@dataclass(slots=True)
class _Work:
    """What the layers with one and the same window do in one step."""

    cursors: list[Cursor] = field(default_factory=list)  # of single rows, from row 0
    masks: list[torch.Tensor] = field(default_factory=list)
    chunks: list[tuple[Cursor, slice, list[_Piece]]] = field(default_factory=list)


class Batch:
    """One step's rows. `spans` are in the order of the rows; spans of one row (decoding sequences) come first.

    It travels through the model's forward to every attention layer, which calls `attend`.
    """

    def __init__(self, store: KvStore, spans: Sequence[Span], masks: MaskCache) -> None:
        self.spans = tuple(spans)
        self.rows = sum(span.length for span in spans)
        self._store = store
        self._masks = masks
        self._work: dict[int | None, _Work] = {}

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scale: float,
        window: int | None,
    ) -> torch.Tensor:
        """Store the new keys and values and attend: query [1, head, rows, dim] → [1, rows, head, dim].

        Rows beyond the batch's own are padding and come back as zeros.
        """
        heads, rows, dim = query.shape[1:]
        kv_heads = key.shape[1]
        group = heads // kv_heads
        if window not in self._work:
            self._work[window] = self._plan(window, group, query.dtype)
        work = self._work[window]
        kv = torch.stack((key[0], value[0]))  # [2, kv_head, rows, dim]
        folded = query[0].unflatten(0, (kv_heads, group)).permute(2, 0, 1, 3)  # [rows, kv_head, group, dim]
        parts = _attend_single(layer, work, folded, kv, scale)
        for cursor, span, pieces in work.chunks:
            cursor.write(layer, kv[:, :, span])
            keys, values = cursor.read(layer)
            parts += [_attend_piece(piece, folded, keys, values, scale) for piece in pieces]
        if rows > self.rows:
            parts.append(query.new_zeros(rows - self.rows, kv_heads, group, dim))
        return torch.cat(parts).reshape(1, rows, heads, dim)

    def _plan(self, window: int | None, group: int, dtype: torch.dtype) -> _Work:
        masks, work, row = self._masks.get(window, dtype), _Work(), 0
        for span in self.spans:
            first, stop = key_range(span.start, window)[0], key_range(span.start + span.length - 1, window)[1]
            cursor = self._store.cursor(span.key, span.start, span.length, first, stop)
            if span.length == 1 and not work.chunks:
                work.cursors.append(cursor)
                work.masks.append(masks.row(span.start))
            else:
                pieces = _pieces(span, row, first, masks, group)
                work.chunks.append((cursor, slice(row, row + span.length), pieces))
            row += span.length
        return work


def _pieces(span: Span, row: int, base: int, masks: Masks, group: int) -> list[_Piece]:
    pieces, start, end = [], span.start, span.start + span.length
    while start < end:
        first, stop = key_range(start, masks.window)
        count = min(end, start // POSITION_BLOCK * POSITION_BLOCK + POSITION_BLOCK) - start
        mask = masks.rows(start, count, group)
        pieces.append(_Piece(row + start - span.start, count, slice(first - base, stop - base), mask))
        start += count
    return pieces


def _attend_single(layer: int, work: _Work, folded: torch.Tensor, kv: torch.Tensor, scale: float) -> list[torch.Tensor]:
    """One call a sequence: to share a call would mean to copy their keys together, which costs more."""
    count, group = len(work.cursors), folded.shape[2]
    if not count:
        return []
    queries = pad(folded[:count], (0, 0, 0, -group % 4)).unsqueeze(1)
    outs = []
    new = kv[:, :, :count].permute(2, 0, 1, 3).unsqueeze(3)  # [row, 2, kv_head, 1, dim]
    for cursor, mask, query, row in zip(work.cursors, work.masks, queries.unbind(0), new.unbind(0), strict=True):
        cursor.write(layer, row)
        keys, values = cursor.read(layer)
        outs.append(scaled_dot_product_attention(query, keys, values, attn_mask=mask, scale=scale))
    return [torch.cat(outs)[:, :, :group]]


def _attend_piece(
    piece: _Piece, folded: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float
) -> torch.Tensor:
    rows, kv_heads, group, dim = folded[piece.row : piece.row + piece.count].shape
    query = folded[piece.row : piece.row + piece.count].permute(1, 0, 2, 3).reshape(1, kv_heads, rows * group, dim)
    query = pad(query, (0, 0, 0, -(rows * group) % 4))
    keys, values = keys[:, :, piece.keys], values[:, :, piece.keys]
    out = scaled_dot_product_attention(query, keys, values, attn_mask=piece.mask, scale=scale)
    return out[0, :, : rows * group].view(kv_heads, rows, group, dim).transpose(0, 1)
