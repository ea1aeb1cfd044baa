"""What a request does to a row of logits before a token is chosen: bans, bias and penalties.

All of it follows from the row, the sampling settings and the ids so far. No count is carried from step to step, so a
restart cannot lose or double one.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Rows

import numpy as np
import numpy.typing as npt

from prelay_queue.job import Sampling

Floats = npt.NDArray[np.float32]


def shapes(sampling: Sampling) -> bool:
    """Whether these settings change logits at all."""
    return bool(
        sampling.logit_bias
        or sampling.bad_words
        or sampling.min_tokens
        or sampling.presence_penalty
        or sampling.frequency_penalty
        or sampling.repetition_penalty != 1
    )


def shaped(row: Floats, sampling: Sampling, prompt_ids: Rows[int], ids: Rows[int], ends: Rows[int]) -> Floats:
    """A changed copy of one row of logits [vocabulary]; `ends` are the model's own end tokens.

    In the order of vLLM: 1 bans, 2 bias, 3 the repetition penalty, over prompt and answer (Keskar et al. 2019: a
    positive logit is divided, a negative one multiplied), 4 presence and frequency penalties, over the answer alone
    (OpenAI's formula: logit - presence * (count > 0) - frequency * count).
    """
    row = row.copy()
    row[_banned(sampling, ids, ends)] = -np.inf  # 1
    for token, bias in sampling.logit_bias:  # 2
        row[token] += np.float32(bias)
    if sampling.repetition_penalty != 1:  # 3
        seen = np.unique(np.array([*prompt_ids, *ids], dtype=np.int64))
        penalty, logits = np.float32(sampling.repetition_penalty), row[seen]
        row[seen] = np.where(logits > 0, logits / penalty, logits * penalty)
    if ids and (sampling.presence_penalty or sampling.frequency_penalty):  # 4
        seen, counts = np.unique(np.array(ids, dtype=np.int64), return_counts=True)
        penalties = sampling.presence_penalty + sampling.frequency_penalty * counts
        row[seen] -= penalties.astype(np.float32)
    return row


def _banned(sampling: Sampling, ids: Rows[int], ends: Rows[int]) -> list[int]:
    banned = list(_last_of_bad_words(sampling, ids))
    if len(ids) < sampling.min_tokens:
        banned += [*ends, *sampling.stop_token_ids]
    return banned


def _last_of_bad_words(sampling: Sampling, ids: Rows[int]) -> Iterator[int]:
    """The tokens that would complete a bad word now."""
    for *beginning, last in sampling.bad_words:
        if not beginning or list(ids[-len(beginning) :]) == beginning:
            yield last
