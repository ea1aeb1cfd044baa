"""The plain loop to compare with: transformers' `model.generate`, greedy, fixed lengths, as one static batch."""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from typing import Any

import torch
from transformers import AutoModelForCausalLM


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", help="folder of the model (see `prelay model path`)")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--output", type=int, default=64)
    parser.add_argument("--runs", type=int, default=3)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=getattr(torch, args.dtype)).eval()
    rng = random.Random(0)
    for batch in args.batch:
        ids = torch.tensor([[rng.randrange(100, 30000) for _ in range(args.prompt)] for _ in range(batch)])
        first = statistics.median(timed(model, ids, 1) for _ in range(args.runs))
        whole = statistics.median(timed(model, ids, args.output) for _ in range(args.runs))
        print(
            json.dumps(
                {
                    "batch": batch,
                    "threads": args.threads,
                    "dtype": args.dtype,
                    "ttft_ms": round(1000 * first, 1),
                    "tpot_ms": round(1000 * (whole - first) / (args.output - 1), 1),
                    "e2e_ms": round(1000 * whole, 1),
                    "tokens_per_s": round(batch * args.output / whole, 1),
                }
            ),
            flush=True,
        )


def timed(model: torch.nn.Module, ids: torch.Tensor, output: int) -> float:
    """Seconds for `output` tokens after each row of `ids`."""
    start = time.perf_counter()
    generate: Any = model.generate  # to the type of a module, what it does not know is a tensor
    generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=output, min_new_tokens=output, do_sample=False)
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
