"""Log-probabilities of one row of logits: of the model's own distribution, before bans, penalties and temperature.

As vLLM and OpenAI report them. Each row is worked on by itself, as in the sampler, so neighbours change no bit of it.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from prelay_queue.note import TokenLogprobs

from .native.lib import Kernels

Floats = npt.NDArray[np.float32]


def logprobs_of(row: Floats, token: int, count: int, kernels: Kernels | None = None) -> TokenLogprobs:
    """`token` and the `count` likeliest of a row of logits [vocabulary]. Of equals the lower id ranks first."""
    if kernels is not None:
        log, rank, ids, likely = kernels.describe(row, token, count)
        return TokenLogprobs(log, rank, tuple(zip(ids, likely, strict=True)))
    shifted = row.astype(np.float64) - np.float64(row.max())
    logs = shifted - np.log(np.exp(shifted).sum())
    own = row[token]
    rank = 1 + int((row > own).sum()) + int((row[:token] == own).sum())
    return TokenLogprobs(float(logs[token]), rank, tuple((int(i), float(logs[i])) for i in _likeliest(row, count)))


def _likeliest(row: Floats, count: int) -> npt.NDArray[np.int64]:
    count = min(count, len(row))
    if count == 0:
        return np.empty(0, dtype=np.int64)
    bar = np.partition(row, len(row) - count)[len(row) - count]
    found = np.flatnonzero(row >= bar)  # more than `count` where several equal the last
    return found[np.lexsort((found, -row[found]))][:count]
