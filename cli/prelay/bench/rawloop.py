"""The engine's own loop, timed: loading, prompts, and decode steps at a fixed batch. Runs in a process of its own."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open

from prelay_engine import engine as engine_module
from prelay_engine import model as model_module
from prelay_engine.blocks import BlockPool
from prelay_engine.config import EngineConfig
from prelay_engine.contiguous import ContiguousKv
from prelay_engine.engine import Engine
from prelay_engine.errors import EngineError
from prelay_engine.loading import load
from prelay_engine.model import Model
from prelay_engine.sequence import Sequence as Running
from prelay_queue.job import Sampling

from . import proc
from .figures import quantiles

#: Steps of each kind before those that count.
_WARM_STEPS = 4
_ENDLESS = 1 << 20
#: What is sampling, by the modules that call it.
_SAMPLER = {"sample": vars(model_module), "logprobs_of": vars(engine_module)}
#: What the sampler is asked for: the least, what chats ask for, and all that costs.
SAMPLINGS = {
    "greedy": Sampling(_ENDLESS, temperature=0, ignore_eos=True),
    "seeded": Sampling(_ENDLESS, temperature=0.8, top_p=0.95, seed=7, ignore_eos=True),
    "penalties + logprobs": Sampling(
        _ENDLESS,
        temperature=0.8,
        top_p=0.95,
        seed=7,
        ignore_eos=True,
        repetition_penalty=1.1,
        presence_penalty=0.5,
        frequency_penalty=0.5,
        logprobs=5,
    ),
}

Tell = Callable[[str, float, float], None]


def measure_load(config: EngineConfig, *, cold: bool = False) -> tuple[Model, dict[str, Any]]:
    """Load a model and say what that took: seconds and bytes. `cold`: its files are not in the page cache before."""
    if cold:
        _out_of_cache(config.model)
    proc.forget_peak()
    before, start, cpu = proc.memory(), time.perf_counter(), time.process_time()
    model = load(config)
    took, cpu = time.perf_counter() - start, time.process_time() - cpu
    after = proc.memory()
    return model, {
        "model": config.model.name,
        "classes": type(model.net).__name__,
        "dtype": str(model.geometry.dtype).removeprefix("torch."),
        "kernels": model.how,
        "exact": model.exact,
        "exactness": model.exactness,
        "files_bytes": _files_bytes(config.model),
        "weights_bytes": _weights(config.model) * model.geometry.dtype.itemsize or None,
        "page_cache": "cold" if cold else "as it was",
        "load_s": round(took, 3),
        "load_cpu_s": round(cpu, 3),
        "rss_before_bytes": before["rss"],
        "rss_after_bytes": after["rss"],
        "anonymous_after_bytes": after["anonymous"],
        "peak_loading_bytes": after["peak"],
    }


@dataclass(frozen=True, slots=True)
class RawLoop:
    """A loaded model, on which each measurement runs an engine of its own."""

    model: Model
    config: EngineConfig

    def prefill(self, tokens: int, runs: int) -> dict[str, Any]:
        """One prompt at a time, until its first token."""
        taken = [self._first_token(tokens, run) for run in range(runs + 1)][1:]  # the first is a warm-up
        middle = float(np.median(taken))
        figures = {"tokens": tokens, "chunk": self.config.prefill_chunk, "runs": runs}
        return figures | {"ms": round(1000 * middle, 3), "tokens_per_s": round(tokens / middle, 1)}

    def _first_token(self, tokens: int, seed: int) -> float:
        with self._engine(1, tokens + 1) as engine:
            engine.add(self._sequence(f"p{seed}", tokens, seed))
            start = time.perf_counter()
            while not engine.step().tokens:
                pass
            return time.perf_counter() - start

    def decode(self, batch: int, prompt: int, steps: int, tell: Callable[[int], None]) -> list[dict[str, Any]]:
        """`steps` steps for each way of sampling, in turn, so that all see the same machine and the same contexts."""
        kinds, rounds = list(SAMPLINGS), _WARM_STEPS + steps
        longest = prompt + 2 + len(kinds) * rounds
        if longest > self.model.context_len:
            raise EngineError(
                f"that takes {longest} positions, and the model has {self.model.context_len}: fewer --steps"
            )
        times: dict[str, list[tuple[float, float]]] = {kind: [] for kind in kinds}
        with self._engine(batch, longest) as engine, _timed_sampler() as sampled:
            running = [self._sequence(f"d{n}", prompt, n) for n in range(batch)]
            for sequence in running:
                engine.add(sequence)
            while not all(sequence.ids for sequence in running):
                engine.step()
            for number in range(rounds):
                tell(number)
                for kind in kinds:
                    for sequence in running:
                        sequence.sampling = SAMPLINGS[kind]
                    sampled.clear()
                    start = time.perf_counter()
                    engine.step()
                    times[kind].append((time.perf_counter() - start, sum(sampled)))
            grown = running[0].tokens
        return [
            {"batch": batch, "sampling": kind, "context": [prompt, grown]} | _figures(batch, times[kind][_WARM_STEPS:])
            for kind in kinds
        ]

    @contextmanager
    def _engine(self, sequences: int, tokens: int) -> Iterator[Engine]:
        """An engine with room for so many sequences of so many tokens, and nothing in it afterwards."""
        blocks = sequences * -(-tokens // self.config.block_size)
        config = EngineConfig(
            self.config.model,
            block_size=self.config.block_size,
            num_blocks=blocks,
            max_running=sequences,
            prefill_chunk=self.config.prefill_chunk,
            threads=self.config.threads,
        )
        yield Engine(self.model, ContiguousKv(self.model.geometry, BlockPool(blocks), config.block_size), config)

    def _sequence(self, key: str, tokens: int, seed: int) -> Running:
        """A prompt like no other, so that no cache knows it."""
        ids = np.random.default_rng([seed, tokens]).integers(0, self.model.vocab_size, tokens)
        return Running(key, tuple(ids.tolist()), SAMPLINGS["greedy"])


def _figures(batch: int, times: Sequence[tuple[float, float]]) -> dict[str, Any]:
    steps, sampling = (np.array(column) for column in zip(*times, strict=True))
    return {
        "steps": len(times),
        "step_ms": quantiles(steps),
        "tokens_per_s": round(batch / float(steps.mean()), 1),
        "sampler_ms": quantiles(sampling),
        "sampler_share": round(float(sampling.sum() / steps.sum()), 4),
    }


@contextmanager
def _timed_sampler() -> Iterator[list[float]]:
    """Stands around the engine's own calls for tokens and their log-probabilities: the seconds of each call."""
    plain, seconds = {name: names[name] for name, names in _SAMPLER.items()}, list[float]()

    def timed(function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*given: Any) -> Any:
            start = time.perf_counter()
            try:
                return function(*given)
            finally:
                seconds.append(time.perf_counter() - start)

        return run

    for name, names in _SAMPLER.items():
        names[name] = timed(plain[name])
    try:
        yield seconds
    finally:
        for name, names in _SAMPLER.items():
            names[name] = plain[name]


def _files(model: Path) -> list[Path]:
    return sorted(model.glob("*.safetensors")) if model.is_dir() else [model]


def _files_bytes(model: Path) -> int:
    return sum(file.stat().st_size for file in _files(model))


def _weights(model: Path) -> int:
    """The numbers in the files of a folder; 0 where they are of another kind."""
    if not model.is_dir():
        return 0
    count = 0
    for file in _files(model):
        with safe_open(file, framework="pt") as tensors:
            count += sum(torch.Size(tensors.get_slice(name).get_shape()).numel() for name in tensors.keys())  # noqa: SIM118 - no mapping
    return count


def _out_of_cache(model: Path) -> None:
    """Have the kernel read the weights from the disk again."""
    for file in _files(model):
        descriptor = os.open(file, os.O_RDONLY)
        try:
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)
