"""Prelay beside others under four closed-loop loads: medians over rounds in which all take turns, and ratios.

    python -m benchmarks.peers.table $(prelay model path)
    python -m benchmarks.peers.install_vllm /tmp/vllm && \\
        python -m benchmarks.peers.table $(prelay model path) --vllm /tmp/vllm --rounds 5 --json table.json
    python -m benchmarks.peers.table $(prelay model path) --llama-cpp ./llama-server --gguf model-bf16.gguf
    python -m benchmarks.peers.table $(prelay model path) --url other=http://127.0.0.1:8080

The client runs on the same cores, prompts are random token ids, answers have the length asked for (ignore_eos), greedy.
Every server is started anew for each round and warmed up; only one runs at a time (one given by --url should be
idle meanwhile). Run from the repository's root.
"""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prelay.bench import facts

from .servers import LlamaCpp, Prelay, Running, Server, Vllm

Figures = dict[str, float]
#: Some servers close a connection at the moment when the next request comes by it.
_TRIES = 3


@dataclass(frozen=True)
class Load:
    """So many streams at a time, each of so many tokens in and out; `whole`: tokens in count, too."""

    streams: int
    tokens_in: int
    tokens_out: int
    requests: int
    whole: bool = False

    @property
    def name(self) -> str:
        return f"{self.streams} × {self.tokens_in} → {self.tokens_out}"


LOADS = (Load(1, 128, 64, 6), Load(8, 128, 64, 32), Load(32, 128, 64, 96), Load(8, 1024, 32, 16, whole=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="a Hugging Face folder")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--vllm", type=Path, metavar="FOLDER", help="environment that install_vllm made")
    parser.add_argument("--llama-cpp", type=Path, metavar="BINARY", help="a llama-server")
    parser.add_argument("--gguf", type=Path, metavar="FILE", help="the model for it")
    parser.add_argument("--url", action="append", default=[], metavar="NAME=URL", help="a server that runs already")
    parser.add_argument(
        "--prelay", action="append", metavar="NAME=OPTIONS",
        help='a way to start Prelay; default: "default=" and "unified=--unified 1"',
    )  # fmt: skip
    parser.add_argument("--load", type=int, action="append", metavar="N", help="only the N-th load, from 1")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if (args.llama_cpp is None) != (args.gguf is None):
        parser.error("--llama-cpp and --gguf go together")
    servers = chosen(args.prelay or ["default=", "unified=--unified 1"], args.vllm, args.llama_cpp, args.gguf, args.url)
    loads = [LOADS[number - 1] for number in args.load or range(1, len(LOADS) + 1)]
    found: dict[str, dict[str, list[Figures]]] = {server.name: {load.name: [] for load in loads} for server in servers}
    data: dict[str, Any] = {"facts": facts.gather(), "figures": found}
    for number in range(args.rounds):
        for server in servers:
            with server.running(args.model) as url:
                for load in loads:
                    found[server.name][load.name].append(measure(url, load))
                    print(f"round {number + 1}", server.name, load.name, found[server.name][load.name][-1], flush=True)
        if args.json:
            args.json.write_text(json.dumps(data, indent=1))
    print(table(found, loads))


def chosen(
    prelay: Sequence[str], vllm: Path | None, llama_cpp: Path | None, gguf: Path | None, urls: Sequence[str]
) -> list[Server]:
    servers: list[Server] = []
    for words in prelay:
        name, _, options = words.partition("=")
        servers.append(Prelay(f"prelay {name}", shlex.split(options)))
    if vllm is not None:
        servers.append(Vllm("vLLM", vllm))
    if llama_cpp is not None and gguf is not None:
        servers.append(LlamaCpp("llama.cpp", llama_cpp, gguf))
    for words in urls:
        name, _, url = words.partition("=")
        servers.append(Running(name, url))
    return servers


def measure(url: str, load: Load) -> Figures:
    """Of one level: tokens a second, and medians in milliseconds."""
    command = [sys.executable, "-m", "prelay", "bench", "serve", "--url", url, "--json", "-"]  # the first model there
    command += ["--concurrency", str(load.streams), "--requests", str(load.requests), "--warmup", "2"]
    command += ["--input-len", str(load.tokens_in), "--output-len", str(load.tokens_out)]
    for _ in range(_TRIES):
        (level,) = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)["levels"]
        if not level["failed"]:
            break
        print(f"{level['failed']} requests failed, so once more: {level['failures']}", flush=True)
    else:
        raise SystemExit(f"{load.name}: requests fail again and again")
    rate = level["tokens_out_per_s"] + (level["tokens_in_per_s"] if load.whole else 0)
    return {"tokens/s": rate, "ttft": level["ttft_ms"]["p50"], "tpot": level["tpot_ms"]["p50"]}


def table(found: dict[str, dict[str, list[Figures]]], loads: Sequence[Load]) -> str:
    """Markdown: tokens/s (TTFT p50 / TPOT p50, ms), and how many times the first server's rate that is."""
    lines = ["| load | " + " | ".join(found) + " |", "|---" * (len(found) + 1) + "|"]
    for load in loads:
        medians = [_medians(figures[load.name]) for figures in found.values()]
        first = medians[0]["tokens/s"]
        cells = [
            f"{one['tokens/s']:.0f} ({one['ttft']:.0f} / {one['tpot']:.1f})"
            + ("" if i == 0 else f" · {first / one['tokens/s']:.2f}×")
            for i, one in enumerate(medians)
        ]
        lines.append(f"| {load.name}{', in and out' if load.whole else ''} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _medians(figures: Sequence[Figures]) -> Figures:
    return {name: statistics.median(each[name] for each in figures) for name in figures[0]}


if __name__ == "__main__":
    main()
