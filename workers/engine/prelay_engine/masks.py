"""Additive masks over a range of keys: 0 where a row attends, -inf elsewhere."""

from __future__ import annotations

import torch

from .config import POSITION_BLOCK

#: Masked keys that a range may have before a row's window: see `key_range`.
_BEFORE = 2 * POSITION_BLOCK


def key_range(position: int, window: int | None) -> tuple[int, int]:
    """The keys [first, stop) that a row's attention runs over: a function of its block of positions only."""
    block = position // POSITION_BLOCK * POSITION_BLOCK
    first = 0 if window is None else max(0, block - window + 1) // POSITION_BLOCK * POSITION_BLOCK
    return first, block + POSITION_BLOCK


class Masks:
    """Masks for one sliding window (None: all earlier positions) and dtype.

    All are slices of one strip, `_BEFORE` times -inf, a zero per position of the window, POSITION_BLOCK times
    -inf; the mask of the next position is the same strip read one place earlier.
    """

    def __init__(self, window: int | None, dtype: torch.dtype) -> None:
        self.window = window
        self._dtype = dtype
        self._strip = torch.empty(0)
        self._zeros = 0
        self._lengthen(window or 1024)

    def row(self, position: int) -> torch.Tensor:
        """[1, 1, 1, keys] for the key range of `position`; a view."""
        begin, keys = self._place(position)
        return self._strip[begin : begin + keys].view(1, 1, 1, keys)

    def rows(self, start: int, count: int, group: int) -> torch.Tensor:
        """[1, 1, count · group filled up to a multiple of 4, keys] for positions of one block."""
        begin, keys = self._place(start)
        strips = self._strip.unfold(0, keys, 1)
        wanted = torch.arange(count).repeat_interleave(group)
        wanted = torch.cat((wanted, wanted[-1:].expand(-len(wanted) % 4)))
        return strips[begin - wanted].view(1, 1, len(wanted), keys)

    def _place(self, position: int) -> tuple[int, int]:
        first, stop = key_range(position, self.window)
        if self.window is None and stop > self._zeros:
            self._lengthen(2 * stop)
        oldest = position - self._zeros + 1  # the earliest position that the row attends to
        return _BEFORE + first - oldest, stop - first

    def _lengthen(self, zeros: int) -> None:
        self._zeros = zeros
        self._strip = torch.full((_BEFORE + zeros + POSITION_BLOCK,), float("-inf"), dtype=self._dtype)
        self._strip[_BEFORE : _BEFORE + zeros] = 0.0


class MaskCache:
    """The masks of one model, by window and dtype."""

    def __init__(self) -> None:
        self._masks: dict[tuple[int | None, torch.dtype], Masks] = {}

    def get(self, window: int | None, dtype: torch.dtype) -> Masks:
        if (window, dtype) not in self._masks:
            self._masks[window, dtype] = Masks(window, dtype)
        return self._masks[window, dtype]
