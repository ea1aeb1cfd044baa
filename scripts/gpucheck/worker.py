"""A prefill or a decode worker without its queue: the engine and transport that a real one has."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from prelay_engine.engine import Engine
from prelay_engine.sequence import Sequence
from prelay_queue.job import Sampling
from prelay_queue.settings import QueueSettings
from prelay_worker.backend import Transport
from prelay_worker.config import Role, WorkerConfig
from prelay_worker.gpu import gpu_engine

from .networks import config
from .rig import Rig


def engine_of(rig: Rig, role: Role, folder: Path, blocks: int, transport: str) -> tuple[Engine, Transport, Any]:
    """As a worker makes it."""
    engine_config = config(rig, folder, exact=False, running=rig.pick(16, 4))
    worker = WorkerConfig(
        role, QueueSettings("redis://nowhere", "none"), folder, kv_blocks=blocks, dtype=engine_config.dtype,
        max_running=engine_config.max_running, prefill_chunk=engine_config.prefill_chunk, prefix_cache=False,
        gpu=engine_config.gpu, kv_transport=transport,
    )  # fmt: skip
    return gpu_engine(worker, engine_config, f"{role.value}-of-the-check")


def sequence(number: int, prompt: list[int], tokens: int, *, hand_over: bool = False) -> Sequence:
    """Every second one is drawn, for a random model soon repeats what is likeliest."""
    sampling = Sampling(tokens, temperature=float(number % 2), seed=number, ignore_eos=True)
    return Sequence(f"job-{number}@0", tuple(prompt), sampling, hand_over=hand_over, arrival_ms=number)


def run_out(engine: Engine) -> dict[str, list[int]]:
    """Step until nothing runs: the tokens of each sequence, by key."""
    found: dict[str, list[int]] = {}
    while engine.has_work:
        for token in engine.step().tokens:
            found.setdefault(token.key, []).append(token.token)
    return found


class Worker:
    """Commands of a peer are its methods. See `peer.py`."""

    def __init__(self, rig: Rig) -> None:
        self._rig = rig
        self._engine: Engine
        self._transport: Transport

    def load(self, role: str, folder: str, blocks: int, transport: str) -> str:
        self._engine, self._transport, model = engine_of(self._rig, Role(role), Path(folder), blocks, transport)
        return str(model.how)

    def prefill(self, prompts: list[list[int]], tokens: int) -> list[dict[str, Any]]:
        """Prefill all in one go and hold them: of each, what a decode worker needs."""
        made = [sequence(number, prompt, tokens, hand_over=True) for number, prompt in enumerate(prompts)]
        for each in made:
            self._engine.add(each)
        run_out(self._engine)
        return [{"ids": each.ids, "kv": self._transport.export(each.key, each.tokens - 1).decode()} for each in made]

    def decode(self, prompts: list[list[int]], tokens: int, handed: list[dict[str, Any]]) -> list[list[int]]:
        """Take all of them over, and the whole answers."""
        made = [sequence(number, prompt, tokens) for number, prompt in enumerate(prompts)]
        for each, given in zip(made, handed, strict=True):
            each.ids.extend(given["ids"])
            self._engine.receive(each)
            self._transport.fetch(given["kv"].encode(), each.key, each.tokens - 1)
            self._engine.join(each.key)
        run_out(self._engine)
        return [each.ids for each in made]

    def close(self) -> str:
        self._transport.close()
        return "closed"
