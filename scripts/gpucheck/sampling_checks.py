"""The sampling kernel against the sampler on the host."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from prelay_engine.gpu.draws import Params
from prelay_engine.gpu.kernels.sample import sample as draw
from prelay_engine.sampler import NO_TOKEN, Draw, uniform
from prelay_engine.sampler import sample as draw_on_host
from prelay_queue.job import Sampling

from .found import Found, need, passed
from .rig import Rig

#: Powers of e are not rounded alike on a card and on a host: so many of the tokens must be the same all the same.
_SAME = 0.97
#: … and where one is not, the point must fall this near to what the card drew, as a share of all weights.
_NEAR = 1e-5


def sample_greedy(rig: Rig) -> Found:
    for vocab in rig.pick((1, 1000, 49152, 128256), (1, 300)):
        logits = rig.randn(8, vocab, seed=vocab)
        wanted = logits.argmax(-1).tolist()
        high = logits.max() + 1
        logits[1, vocab // 2 :] = high
        wanted[1] = vocab // 2  # of equals the first
        logits[2, vocab - 1] = float("nan")
        logits[3] = float("-inf")
        logits[4, 0] = float("inf")
        wanted[2:5] = [NO_TOKEN] * 3
        settings = [
            Sampling(1, temperature=0.0) if row % 2 else Sampling(1, temperature=1.0, top_k=1) for row in range(8)
        ]
        need(drawn(rig, logits, settings) == wanted, f"other tokens than the greatest, of {vocab}")
    return passed("ties, NaN, infinities")


def sample(rig: Rig) -> Found:
    """Logits of a model's spread; equal to the host's token, but where the point falls on the edge of two."""
    rows = rig.pick(64, 1)
    settings: list[dict[str, Any]] = [
        {},
        {"min_p": 0.05},
        {"top_k": 5},
        {"top_k": 2000},
        {"top_p": 0.7},
        {"top_p": 0.95, "top_k": 50},
        {"top_p": 0.9, "top_k": 900, "min_p": 0.01},
    ]
    count = equal = 0
    for vocab in rig.pick((1000, 49152, 128256), (300,)):
        for number, values in enumerate(settings):
            logits = rig.randn(rows, vocab, seed=number) * 2
            each = [Sampling(1, temperature=0.7 + 0.01 * row, seed=row, **values) for row in range(rows)]
            found = drawn(rig, logits, each)
            there = logits.cpu()
            wanted = draw_on_host(there, [Draw(one, 0) for one in each])
            for row in range(rows):
                off = 0.0 if found[row] == wanted[row] else _off(there[row].numpy(), each[row], found[row])
                need(off <= _NEAR, f"{values}, vocabulary {vocab}: token {found[row]} lies {off:.2g} from the point")
            count += rows
            equal += sum(a == b for a, b in zip(found, wanted, strict=True))
    need(equal >= _SAME * count, f"only {equal} of {count} tokens are the host's")
    return passed(f"{equal} of {count} tokens are the host's, the others its neighbours")


def sample_rows(rig: Rig) -> Found:
    rows, vocab = rig.pick((128, 128256), (4, 300))
    logits = rig.randn(rows, vocab, seed=5)
    each = [
        Sampling(1, temperature=0.5 + row % 3, seed=row, top_p=(1.0, 0.9)[row % 2], top_k=(0, 40, 5000)[row % 3])
        for row in range(rows)
    ]
    together = drawn(rig, logits, each)
    for row in range(0, rows, rig.pick(9, 2)):
        need(drawn(rig, logits[row : row + 1], each[row : row + 1]) == [together[row]], f"row {row} alone differs")
    back = drawn(rig, logits.flip(0), each[::-1])
    need(back == together[::-1], "in another order tokens differ")
    need(drawn(rig, logits, each) == together, "drawn again tokens differ")
    return passed(f"{rows} rows")


def drawn(rig: Rig, logits: torch.Tensor, settings: list[Sampling]) -> list[int]:
    out = torch.full((len(settings),), -7, dtype=torch.int64, device=rig.device)
    params = (torch.from_numpy(each).to(rig.device) for each in Params.of([Draw(one, 0) for one in settings]))
    temperature, top_k, top_p, min_p, point = params
    draw(logits, temperature, top_k, top_p, min_p, point, out)
    tokens: list[int] = out.tolist()
    return tokens


def _off(row: np.ndarray[tuple[int, ...], np.dtype[np.float32]], sampling: Sampling, token: int) -> float:
    """How far from the point `token` lies among the weights left, as a share of them; inf: it is not left.

    Whether the last token that top_p leaves is left may differ: then all lie nearer to the front by its weight.
    """
    weights = np.exp((row.astype(np.float64) - row.max()) / sampling.temperature)
    weights[weights < sampling.min_p * (1 - _NEAR)] = 0
    order = np.argsort(-weights, kind="stable")
    count = min(sampling.top_k, len(row)) if sampling.top_k > 0 else len(row)
    sums = np.cumsum(weights[order[:count]])
    if sampling.top_p < 1:
        count = min(count, int(np.searchsorted(sums, sampling.top_p * sums[-1])) + 1)
    offs = []
    for left in {max(1, count - 1), count, min(count + 1, len(row))}:
        kept = np.zeros(len(row))
        kept[order[:left]] = weights[order[:left]]
        if not 0 <= token < len(row) or kept[token] == 0:
            continue
        share = np.cumsum(kept) / kept.sum()
        point = uniform(sampling.seed, 0)
        before = share[token] - kept[token] / kept.sum()
        offs.append(max(0.0, before - point, point - share[token]))
    return min(offs, default=float("inf"))
