"""What eight-bit weights cost: the perplexity of a text with and without them.

python -m benchmarks.quantization $(prelay model path)
python -m benchmarks.quantization MODEL --text book.txt --text code.py
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from prelay_engine.attention import Span
from prelay_engine.blocks import BlockPool
from prelay_engine.config import EngineConfig, Quantization
from prelay_engine.contiguous import ContiguousKv
from prelay_engine.loading import load
from prelay_engine.model import Model
from prelay_text.tokenizer import Tokenizer

#: Texts that come with Prelay.
TEXTS = (
    Path("README.md"),
    *(Path("docs") / f"{name}.md" for name in ("architecture", "batches", "design", "operations")),
)
#: Positions of each window; the first half of all but the first is context only.
WINDOW = 512


def windows(ids: Sequence[int]) -> Iterator[tuple[Sequence[int], int]]:
    """Windows of ids, and from which of them on tokens are judged: each token of the text once."""
    yield ids[:WINDOW], 1
    for start in range(WINDOW // 2, len(ids) - WINDOW // 2, WINDOW // 2):
        yield ids[start : start + WINDOW], WINDOW // 2


def loss(model: Model, ids: Sequence[int]) -> tuple[float, int]:
    """The sum of -log p over a text's tokens, and how many they are."""
    total, count = 0.0, 0
    for window, first in windows(ids):
        store = ContiguousKv(model.geometry, BlockPool(1), WINDOW)
        store.open("a", len(window), len(window))
        rows = list(range(first - 1, len(window) - 1))
        logits = model.forward(store, [Span("a", 0, len(window))], window, rows)
        total += float(torch.nn.functional.cross_entropy(logits, torch.tensor(window[first:]), reduction="sum"))
        count += len(rows)
    return total, count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="a folder")
    parser.add_argument("--text", type=Path, action="append", help="a file; may be repeated (some of Prelay's own)")
    parser.add_argument("--threads", type=int, default=1)
    given = parser.parse_args()
    tokenizer = Tokenizer.load(given.model)
    texts = {path: tokenizer.encode(path.read_text()) for path in given.text or TEXTS}
    found: dict[Quantization, dict[Path, float]] = {}
    for kind in ("none", "w8a8"):
        model = load(EngineConfig(given.model, threads=given.threads, quantization=kind))
        sums = {path: loss(model, ids) for path, ids in texts.items()}
        sums[Path("all")] = (sum(total for total, _ in sums.values()), sum(count for _, count in sums.values()))
        found[kind] = {path: math.exp(total / count) for path, (total, count) in sums.items()}
    print(f"{'text':24} {'tokens':>8} {'as it is':>9} {'w8a8':>9}")
    for path, plain in found["none"].items():
        eight, count = found["w8a8"][path], sum(map(len, texts.values())) if path == Path("all") else len(texts[path])
        print(f"{path!s:24} {count:8} {plain:9.3f} {eight:9.3f} {100 * (eight / plain - 1):+.2f} %")


if __name__ == "__main__":
    main()
