"""Bytes that any process can compute again, so that nothing but a seed need be told."""

from __future__ import annotations

from collections.abc import Sequence

import torch

#: Words of 32 bits that are computed at a time.
_AT_ONCE = 1 << 26


def fill(pool: torch.Tensor, seed: int) -> None:
    """Write all blocks of pool [block, …], by kernels that are only enqueued."""
    words = _words(pool)
    for first, stop in _pieces(len(words), words.shape[1]):
        words[first:stop] = _expected(torch.arange(first, stop, device=words.device), words.shape[1], seed)


def wrong_blocks(found: torch.Tensor, blocks: Sequence[int], seed: int) -> int:
    """How many of found [block, …], which are to be these `blocks` of a pool filled with `seed`, are not."""
    words, wrong = _words(found), 0
    numbers = torch.tensor(blocks, device=words.device)
    for first, stop in _pieces(len(words), words.shape[1]):
        differs = words[first:stop] != _expected(numbers[first:stop], words.shape[1], seed)
        wrong += int(differs.any(dim=1).sum())
    return wrong


def _words(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(len(tensor), -1).view(torch.int32)


def _expected(blocks: torch.Tensor, words: int, seed: int) -> torch.Tensor:
    """int32 [block, word]; products wrap around. In halves, few of them are numbers that a copy would not change."""
    place = blocks.to(torch.int32)[:, None] * words + torch.arange(words, dtype=torch.int32, device=blocks.device)
    return place * 1664525 + (seed * 1013904223) % (1 << 31)


def _pieces(blocks: int, words: int) -> list[tuple[int, int]]:
    step = max(1, _AT_ONCE // words)
    return [(first, min(first + step, blocks)) for first in range(0, blocks, step)]
