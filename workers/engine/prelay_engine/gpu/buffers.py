"""What a decode step reads and writes on the device, at addresses that never change: CUDA graphs hold them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from ..sampler import NO_TOKEN

Array = npt.NDArray[Any]

#: Bytes to which each field is aligned: kernels are compiled for what their pointers are multiples of.
_ALIGN = 256
#: What every decoding row has one of, by field, with what stands in a row of padding: it has no keys, stores nothing,
#: and takes its greatest logit.
_FIELDS: dict[str, tuple[type[np.generic], float]] = {
    "ids": (np.int64, 0),
    "positions": (np.int64, 0),
    "slots": (np.int64, -1),
    "lengths": (np.int32, 0),
    "top_k": (np.int32, 0),
    "temperature": (np.float32, 0),
    "top_p": (np.float64, 1),
    "min_p": (np.float32, 0),
    "point": (np.float64, 0),
}
_TORCH: dict[type[np.generic], torch.dtype] = {
    np.int64: torch.int64,
    np.int32: torch.int32,
    np.float32: torch.float32,
    np.float64: torch.float64,
}


@dataclass(frozen=True, slots=True)
class DecodeBatch:
    """The rows of one decode step, on the host; each field has one entry a row.

    `tables` hold the blocks of each row's sequence, those of its own position included, in order; arrays of int32
    cost least. `slots` is where its keys go: block · block_size + slot in the block.
    """

    ids: Sequence[int] | Array
    positions: Sequence[int] | Array
    slots: Sequence[int] | Array
    tables: Sequence[Sequence[int] | Array]
    temperature: Sequence[float] | Array
    top_k: Sequence[int] | Array  # 0 and below: all
    top_p: Sequence[float] | Array
    min_p: Sequence[float] | Array
    point: Sequence[float] | Array  # in [0, 1): where the draw falls


EMPTY = DecodeBatch((), (), (), (), (), (), (), (), ())


@dataclass(frozen=True, slots=True)
class DecodeRows:
    """The first rows of the buffers, as views."""

    ids: torch.Tensor  # int64 [rows]
    positions: torch.Tensor  # int64 [rows]
    slots: torch.Tensor  # int64 [rows]; -1: nothing is stored
    tables: torch.Tensor  # int32 [rows, max_blocks]; 0 beyond the blocks that a row has
    lengths: torch.Tensor  # int32 [rows]: keys, its own included; 0: padding
    temperature: torch.Tensor  # float32 [rows]; 0: greedy
    top_k: torch.Tensor  # int32 [rows]; 0: all
    top_p: torch.Tensor  # float64 [rows]
    min_p: torch.Tensor  # float32 [rows]
    point: torch.Tensor  # float64 [rows]
    tokens: torch.Tensor  # int64 [rows]; written by the step
    logits: torch.Tensor | None  # float32 [rows, vocab]; written by the step, and never cleared


class DecodeBuffers:
    """The buffers of steps of up to `max_rows` rows, of sequences of up to `max_blocks` blocks.

    After each `fill` all that a step reads, padding too, is a function of that batch alone. For one thread, and one
    stream: the step must run on the stream that was current when they were filled.
    """

    def __init__(
        self, max_rows: int, max_blocks: int, vocab: int, device: torch.device, *, logits: bool = False
    ) -> None:
        self.max_rows, self.max_blocks = max_rows, max_blocks
        #: Rows and blocks of the longest one, in the last fill.
        self.rows = self.blocks = 0
        self._top_k_most = vocab
        offsets, self._head = _offsets(max_rows)
        # One range of memory for all, the tables last and packed: so one copy brings what the batch has of them.
        nbytes = self._head + 4 * max_rows * max_blocks
        self._device = torch.zeros(nbytes, dtype=torch.uint8, device=device)
        self._host = torch.zeros(nbytes, dtype=torch.uint8, pin_memory=device.type == "cuda")
        self._packed = self._device[self._head :].view(torch.int32)
        self._staged_tables: npt.NDArray[np.int32] = self._host[self._head :].view(torch.int32).numpy()
        self._staged: dict[str, Array] = {}
        views: dict[str, torch.Tensor] = {}
        for name, (kind, _) in _FIELDS.items():
            place = slice(offsets[name], offsets[name] + max_rows * np.dtype(kind).itemsize)
            self._staged[name] = self._host[place].view(_TORCH[kind]).numpy()
            views[name] = self._device[place].view(_TORCH[kind])
        tables = torch.zeros(max_rows, max_blocks, dtype=torch.int32, device=device)
        tokens = torch.full((max_rows,), NO_TOKEN, dtype=torch.int64, device=device)
        rows = torch.zeros(max_rows, vocab, dtype=torch.float32, device=device) if logits else None
        self._all = DecodeRows(**views, tables=tables, tokens=tokens, logits=rows)
        self._sent = torch.cuda.Event() if device.type == "cuda" else None
        self.clear()

    def first(self, rows: int) -> DecodeRows:
        """Views of the first `rows` rows; they stay good, and where they are."""
        views = {name: getattr(self._all, name)[:rows] for name in (*_FIELDS, "tables", "tokens")}
        return DecodeRows(**views, logits=None if self._all.logits is None else self._all.logits[:rows])

    def clear(self) -> None:
        """Only padding is left: a step stores nothing, whatever rows it computes."""
        self.fill(EMPTY)

    @torch.inference_mode()
    def fill(self, batch: DecodeBatch) -> None:
        """Put a batch into the first rows; all others are padding, and `tokens` NO_TOKEN.

        Everything is only enqueued on the current stream. Raises ValueError, changing nothing, for a batch that is
        too large or whose fields differ in their lengths.
        """
        rows, blocks = self._measure(batch)
        if self._sent is not None:
            self._sent.synchronize()  # the last copy has read what is written now
        self._stage(batch, rows, blocks)
        self.rows, self.blocks = rows, blocks
        used = self._head + 4 * rows * blocks
        self._device[:used].copy_(self._host[:used], non_blocking=True)
        if self._sent is not None:
            self._sent.record(torch.cuda.current_stream(self._device.device))
        self._all.tables.zero_()
        self._all.tables[:rows, :blocks].copy_(self._packed[: rows * blocks].view(rows, blocks))
        self._all.tokens.fill_(NO_TOKEN)

    def _measure(self, batch: DecodeBatch) -> tuple[int, int]:
        rows, blocks = len(batch.ids), max(map(len, batch.tables), default=0)
        given = [len(getattr(batch, name)) for name in _FIELDS if name != "lengths"]
        if {rows} != {*given, len(batch.tables)}:
            raise ValueError(f"the fields of a batch have {sorted({*given, len(batch.tables)})} rows")
        if rows > self.max_rows or blocks > self.max_blocks:
            raise ValueError(f"{rows} rows of {blocks} blocks are more than {self.max_rows} of {self.max_blocks}")
        return rows, blocks

    def _stage(self, batch: DecodeBatch, rows: int, blocks: int) -> None:
        for name, (_, padding) in _FIELDS.items():
            if name != "lengths":
                self._staged[name][:rows] = self._bounded(name, getattr(batch, name))
            self._staged[name][rows:] = padding
        np.add(self._staged["positions"][:rows], 1, out=self._staged["lengths"][:rows], casting="same_kind")
        packed = self._staged_tables[: rows * blocks].reshape(rows, blocks)
        for row, table in zip(packed, batch.tables, strict=True):
            row[: len(table)] = table
            row[len(table) :] = 0

    def _bounded(self, name: str, values: Sequence[float] | Array) -> Sequence[float] | Array:
        if name == "top_k":
            return np.clip(np.asarray(values, np.int64), 0, self._top_k_most)
        return values

    def __repr__(self) -> str:
        size = f"{self.rows}/{self.max_rows} rows, {self.blocks}/{self.max_blocks} blocks"
        return f"<DecodeBuffers {size}, on {self._device.device}>"


def _offsets(max_rows: int) -> tuple[dict[str, int], int]:
    """Where each field begins, and where they end, bytes."""
    offsets, end = {}, 0
    for name, (kind, _) in _FIELDS.items():
        offsets[name] = end
        end += -(-max_rows * np.dtype(kind).itemsize // _ALIGN) * _ALIGN
    return offsets, end
