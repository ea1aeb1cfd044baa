"""Texts that a model goes on with, step by step, as an engine's steps are."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count

import numpy as np
import torch

from prelay_engine.attention import Span
from prelay_engine.gpu.capture import TorchCapture
from prelay_engine.gpu.graphs import Capture
from prelay_engine.gpu.model import GpuModel
from prelay_engine.kv import PagedKv
from prelay_engine.sampler import Draw
from prelay_queue.job import Sampling

from .found import need
from .rig import Rig

_GREEDY = Sampling(1 << 20, temperature=0.0)
_KEYS = count()


class Rehearsed:
    """A capture that runs, and gives back what runs again."""

    def capture(self, rows: int, run: Callable[[], None]) -> Callable[[], None]:  # noqa: ARG002
        run()
        return run


def capture(rig: Rig) -> Capture:
    return Rehearsed() if rig.rehearse else TorchCapture(rig.device)


def prompt(vocab: int, length: int, seed: int) -> list[int]:
    dice = random.Random(seed)
    return [dice.randrange(3, vocab) for _ in range(length)]


@dataclass(slots=True)
class Answers:
    """Of each text: the tokens, and the logits [vocabulary] that each was chosen from."""

    ids: list[list[int]] = field(default_factory=list)
    logits: list[list[np.ndarray[tuple[int, ...], np.dtype[np.float32]]]] = field(default_factory=list)


def answers(
    model: GpuModel, store: PagedKv, prompts: Sequence[Sequence[int]], tokens: int, *, chunk: int = 1 << 20,
    sampling: Sequence[Sampling] = (), forced: Answers | None = None, seqs: Sequence[int] = (),
) -> Answers:  # fmt: skip
    """Prefill `prompts` in chunks of up to `chunk` tokens of each, then decode all of them in the same steps.

    With `forced` the tokens fed are those, whatever is chosen. `seqs` is how many tokens of an answer each prompt ends
    in. Nothing of the texts is left in the store.
    """
    keys = [f"text-{next(_KEYS)}" for _ in prompts]
    sampling = sampling or [_GREEDY] * len(prompts)
    seqs = seqs or [0] * len(prompts)
    found = Answers([[] for _ in prompts], [[] for _ in prompts])
    for key, each in zip(keys, prompts, strict=True):
        store.open(key, len(each) + tokens, len(each) + tokens)
    try:
        longest = max(map(len, prompts))
        for start in range(0, longest, chunk):
            parts = [
                (text, list(each[start : start + chunk])) for text, each in enumerate(prompts) if start < len(each)
            ]
            _step(model, store, keys, found, parts, [start] * len(parts), prompts, sampling, seqs)
        for done in range(tokens - 1):
            fed = found.ids if forced is None else forced.ids
            parts = [(text, [fed[text][done]]) for text in range(len(prompts))]
            starts = [len(each) + done for each in prompts]
            _step(model, store, keys, found, parts, starts, prompts, sampling, seqs)
    finally:
        for key in keys:
            store.close(key)
    return found


def _step(
    model: GpuModel, store: PagedKv, keys: Sequence[str], found: Answers, parts: Sequence[tuple[int, list[int]]],
    starts: Sequence[int], prompts: Sequence[Sequence[int]], sampling: Sequence[Sampling], seqs: Sequence[int],
) -> None:  # fmt: skip
    """One step over `parts`, (text, tokens); single rows come first, as the model wants them."""
    laid = sorted(zip(parts, starts, strict=True), key=lambda each: len(each[0][1]) > 1)
    spans = [Span(keys[text], start, len(ids)) for (text, ids), start in laid]
    ids = [token for (_, each), _ in laid for token in each]
    draws, drawing, row = [], [], -1
    for (text, each), start in laid:
        row += len(each)
        if start + len(each) >= len(prompts[text]):
            draws.append((row, Draw(sampling[text], seqs[text] + len(found.ids[text]))))
            drawing.append(text)
    step = model.step(store, spans, ids, draws, [row for row, _ in draws])
    for (row, _), text, token in zip(draws, drawing, step.tokens, strict=True):
        found.ids[text].append(token)
        found.logits[text].append(step.logits[row])


def the_same(found: Answers, expected: Answers, what: str) -> None:
    """Wrong unless tokens and logits are the same bits."""
    for text, (ids, wanted) in enumerate(zip(found.ids, expected.ids, strict=True)):
        pairs = zip(found.logits[text], expected.logits[text], strict=True)
        for place, (mine, theirs) in enumerate(pairs):
            differ = int((mine != theirs).sum())
            need(differ == 0, f"{what}: text {text}, token {place}: {differ} of {len(mine)} logits differ")
        need(ids == wanted, f"{what}: text {text} has other tokens: {ids} and not {wanted}")
    need(all(np.isfinite(row).all() for rows in expected.logits for row in rows), f"{what}: there is a NaN")
    changing = any(not np.array_equal(rows[0], rows[-1]) for rows in expected.logits if len(rows) > 1)
    need(changing or all(len(ids) < 2 for ids in expected.ids), f"{what}: the logits never change")


def farthest(found: Answers, expected: Answers) -> float:
    """The most that logits differ, in standard deviations of a row's."""
    worst = 0.0
    for mine, theirs in zip(found.logits, expected.logits, strict=True):
        for a, b in zip(mine, theirs, strict=True):
            worst = max(worst, float(np.abs(a - b).max() / b.std())) if np.isfinite(a).all() else float("inf")
    return worst


def store_of(rig: Rig, model: GpuModel, blocks: int) -> PagedKv:
    store = model.store(blocks, 16)
    store.tensor.copy_(torch.full((1,), float("nan"), device=rig.device).expand(store.tensor.shape))
    return store
