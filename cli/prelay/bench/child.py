"""The process in which `prelay bench engine` works: one task as JSON in the arguments, JSON lines on stdout.

{"tell": [what, done, whole]}   how far it is
{"figures": {...}}              something that was measured; a group's name to a list of rows
{"error": "..."}                one line, then exit code 1
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from prelay_engine.config import EngineConfig
from prelay_engine.errors import EngineError


def main(raw: str) -> int:
    task = json.loads(raw)
    torch.set_num_interop_threads(1)  # as workers have it
    try:
        _TASKS[task.pop("task")](**task)
    except EngineError as error:
        _say(error=str(error))
        return 1
    return 0


def _say(**message: Any) -> None:
    print(json.dumps(message), flush=True)


def _tell(what: str, done: float, whole: float) -> None:
    _say(tell=[what, done, whole])


def write_model(folder: str, nbytes: int) -> None:
    from .randommodel import write

    _tell("writing a random model", 0, 0)
    size = write(Path(folder), nbytes)
    _say(figures={"random_model": [{"bytes": size.nbytes(), "hidden": size.hidden, "layers": size.layers}]})


def load_only(settings: dict[str, Any], cold: bool) -> None:
    from .rawloop import measure_load

    _tell("loading", 0, 0)
    _, found = measure_load(_config(settings), cold=cold)
    _say(figures={"loads": [found]})


def loop(
    settings: dict[str, Any], cold: bool, batches: list[int], prompt: int, steps: int, prefills: list[int], runs: int
) -> None:
    """1 load, 2 prompts, 3 decode steps. Every row is said as soon as it is known."""
    from . import proc
    from .rawloop import RawLoop, measure_load

    _tell("loading", 0, 0)
    config = _config(settings)
    model, found = measure_load(config, cold=cold)  # 1
    _say(figures={"loads": [found]})
    raw = RawLoop(model, config)
    proc.forget_peak()
    for number, tokens in enumerate(prefills):  # 2
        _tell(f"prefill of {tokens}", number, len(prefills))
        if tokens < model.context_len:
            _say(figures={"prefill": [raw.prefill(tokens, runs)]})
    for batch in batches:  # 3
        tell = partial(_tell, f"decode, batch {batch}", whole=steps)
        _say(figures={"decode": raw.decode(batch, prompt, steps, tell)})
    _say(figures={"peak_running": [{"bytes": proc.memory()["peak"]}]})


def _config(settings: dict[str, Any]) -> EngineConfig:
    return EngineConfig(**settings | {"model": Path(settings["model"])})


_TASKS: dict[str, Callable[..., None]] = {"write_model": write_model, "load_only": load_only, "loop": loop}

if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
