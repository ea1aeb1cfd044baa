"""From logits to tokens: a function of the row, its sampling settings, its seed and its seq, and of nothing else.

Each row is worked on by itself, because a reduction or an exponential over several rows at once may
round a row differently when its neighbours change. One uniform number is drawn per token, by hashing
(seed, seq); no generator is carried, so a restart continues with the numbers it would have had.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence as Rows
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from prelay_queue.job import Sampling

from .native.lib import DrawArgs, Kernels
from .shaping import shaped, shapes

Floats = npt.NDArray[np.float32]
Ids = npt.NDArray[np.int64]

#: The least temperature that a float32 can be divided by without loss.
_COLDEST = float(np.finfo(np.float32).tiny)
#: What `sample` gives for a row without a distribution.
NO_TOKEN = -1
#: How many of the highest logits are sorted before all of them are: most nuclei are smaller.
_FIRST_SORT = 512
#: Weights that are added up before a running sum is kept; a running sum over all is ten times slower.
_BLOCK = 64


@dataclass(frozen=True, slots=True)
class Draw:
    """What is to be drawn for one row of logits: the token at `seq` of an answer.

    The ids so far and the model's own end tokens matter only to settings that shape the logits.
    """

    sampling: Sampling
    seq: int
    prompt_ids: Rows[int] = ()
    ids: Rows[int] = ()
    ends: Rows[int] = ()


def uniform(seed: int, seq: int) -> float:
    """A number in [0, 1) with 53 random bits, the same for the same (seed, seq) everywhere."""
    counter = (seed % 2**64).to_bytes(8, "little") + seq.to_bytes(8, "little")
    word = int.from_bytes(hashlib.blake2b(counter, digest_size=8, person=b"prelay sampler").digest(), "little")
    return (word >> 11) * 2.0**-53


def sample(logits: torch.Tensor, draws: Rows[Draw], kernels: Kernels | None = None) -> list[int]:
    """One token for each row of `logits` [rows, vocabulary] (float32, on the CPU, each row contiguous).

    A row that holds a NaN or no finite value has no distribution: its token is NO_TOKEN.
    """
    rows = [_shaped(row, draw) for row, draw in zip(logits.numpy(), draws, strict=False)]
    if kernels is None:
        return [_one(row, draw) for row, draw in zip(rows, draws, strict=True)]
    return kernels.choose([_args(row, draw) for row, draw in zip(rows, draws, strict=True)], logits.shape[1])


def _shaped(row: Floats, draw: Draw) -> Floats:
    sampling = draw.sampling
    return shaped(row, sampling, draw.prompt_ids, draw.ids, draw.ends) if shapes(sampling) else row


def _args(row: Floats, draw: Draw) -> DrawArgs:
    sampling = draw.sampling
    point = uniform(sampling.seed, draw.seq) if sampling.temperature else 0.0
    return DrawArgs(
        row.ctypes.data, point, sampling.top_p, max(0, sampling.top_k), sampling.temperature, sampling.min_p
    )


def _one(row: Floats, draw: Draw) -> int:
    sampling = draw.sampling
    best = int(np.argmax(row))  # of equals the first; a NaN is the greatest of all
    peak = row[best]
    if not np.isfinite(peak):
        return NO_TOKEN
    if sampling.temperature == 0 or sampling.top_k == 1:
        return best
    weights = row - peak
    with np.errstate(over="ignore"):  # far below the peak: -inf, whose weight is 0
        weights /= np.float32(max(sampling.temperature, _COLDEST))
    np.exp(weights, out=weights)
    if sampling.min_p > 0:
        weights[weights < sampling.min_p] = 0  # the heaviest weighs 1
    point = uniform(sampling.seed, draw.seq)
    if sampling.top_k <= 0 and sampling.top_p >= 1:
        return _pick(weights, point)
    kept = _kept(weights, sampling)
    return int(kept[_pick(weights[kept], point)])


def _pick(weights: Floats, point: float) -> int:
    """The index at which the share `point` of the whole weight is passed: by blocks, then within one."""
    sums = np.cumsum(_block_sums(weights))
    target = min(point * sums[-1], np.nextafter(sums[-1], 0.0))  # the product may be rounded up to the whole
    block = int(np.searchsorted(sums, target, side="right"))
    inside = weights[block * _BLOCK : (block + 1) * _BLOCK]
    before = sums[block - 1] if block else 0.0
    index = int(np.searchsorted(before + np.cumsum(inside, dtype=np.float64), target, side="right"))
    # Two ways of adding the same weights may differ in the last bit.
    return block * _BLOCK + (index if index < len(inside) else int(np.flatnonzero(inside)[-1]))


def _block_sums(weights: Floats) -> npt.NDArray[np.float64]:
    whole = len(weights) // _BLOCK * _BLOCK
    sums = weights[:whole].reshape(-1, _BLOCK).sum(axis=1, dtype=np.float64)
    rest = weights[whole:].sum(dtype=np.float64)
    return np.append(sums, rest) if whole < len(weights) else sums


def _kept(weights: Floats, sampling: Sampling) -> Ids:
    """The tokens, by rising id, that top_k and then top_p leave. Of equals the lower id is kept."""
    count = min(sampling.top_k, len(weights)) if sampling.top_k > 0 else len(weights)
    if sampling.top_p < 1:
        count = _nucleus(weights, count, sampling.top_p)
    if count == len(weights):
        return np.arange(count)
    bar = np.partition(weights, len(weights) - count)[len(weights) - count]
    above, ties = np.flatnonzero(weights > bar), np.flatnonzero(weights == bar)
    return np.sort(np.concatenate((above, ties[: count - len(above)])))


def _nucleus(weights: Floats, limit: int, share: float) -> int:
    """How many of the `limit` heaviest weights make up `share` of what those weigh: the fewest, at least one."""
    if limit < len(weights):
        sums = _falling_sums(weights, limit)
        target = share * float(sums[-1])
    else:
        target = share * float(_block_sums(weights).sum())
        sums = _falling_sums(weights, min(limit, _FIRST_SORT))
        if sums[-1] < target:
            sums = _falling_sums(weights, limit)
    return min(limit, int(np.searchsorted(sums, target, side="left")) + 1)


def _falling_sums(weights: Floats, count: int) -> npt.NDArray[np.float64]:
    """Running sums over the `count` heaviest weights, the heaviest first."""
    heaviest = np.partition(weights, len(weights) - count)[len(weights) - count :] if count < len(weights) else weights
    return np.cumsum(np.sort(heaviest)[::-1], dtype=np.float64)
