"""What checks compute on: a card, or in a rehearsal this CPU under Triton's interpreter."""

from __future__ import annotations

import gc
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch

from prelay_kv.cuda.runtime import Cudart
from prelay_kv.sweep import sweep

T = TypeVar("T")


@dataclass(slots=True)
class Rig:
    """`half` is the type of most checks, `halves` all that are checked beside float32."""

    rehearse: bool
    device: torch.device
    half: torch.dtype
    halves: tuple[torch.dtype, ...]
    say: Callable[[str], None]
    folder: Path
    index: int = 0
    _kept: dict[str, Any] = field(default_factory=dict)
    _last: ExitStack = field(default_factory=ExitStack)

    @classmethod
    def here(cls, rehearse: bool, say: Callable[[str], None]) -> Rig:
        """The first card. In a rehearsal float16 takes bfloat16's place: the interpreter multiplies that wrongly."""
        last = ExitStack()
        folder = Path(last.enter_context(tempfile.TemporaryDirectory(prefix="gpu-check-")))
        if rehearse:
            torch.set_num_threads(1)
            return cls(True, torch.device("cpu"), torch.float16, (torch.float16,), say, folder, _last=last)
        device = torch.device("cuda", 0)
        torch.cuda.set_device(device)
        torch.zeros(1, device=device)  # the context
        return cls(False, device, torch.bfloat16, (torch.bfloat16, torch.float16), say, folder, _last=last)

    def pick(self, on_card: T, rehearsed: T) -> T:
        return rehearsed if self.rehearse else on_card

    def once(self, name: str, make: Callable[[], T], end: Callable[[T], None] | None = None) -> T:
        """What `make` gives, made by the first check that asks and kept for the others of this process."""
        if name not in self._kept:
            self._kept[name] = made = make()
            if end is not None:
                self._last.callback(end, made)
        return self._kept[name]  # type: ignore[no-any-return]

    def drop(self, name: str) -> None:
        """Let go of what `once` keeps, which has no end of its own."""
        self._kept.pop(name, None)
        self.tidy()

    def runtime(self) -> Cudart:
        return self.once("runtime", Cudart.find)

    def free(self) -> int:
        """Bytes free on the device, whoever uses the rest."""
        self.runtime().set_device(self.index)
        return self.runtime().memory()[0]

    def dice(self, seed: int) -> torch.Generator:
        return torch.Generator(self.device).manual_seed(seed)

    def randn(self, *shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.randn(*shape, generator=self.dice(seed), device=self.device).to(dtype)

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def tidy(self) -> None:
        """Give back what nobody holds."""
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def sound(self) -> bool:
        """Whether this process can go on using the device: an illegal access ends that for good."""
        try:
            self.wait()
            self.tidy()
            return bool((torch.ones(8, device=self.device) * 2).sum().item() == 16.0)
        except Exception:
            return False

    def timed(self, run: Callable[[], object], warm_ups: int = 2, repeats: int = 7) -> float:
        """The median of `repeats` runs in seconds, on the card by its own clock."""
        if self.rehearse:
            warm_ups, repeats = 0, 1
        for _ in range(warm_ups):
            run()
        self.wait()
        return statistics.median(self._one(run) for _ in range(repeats))

    def _one(self, run: Callable[[], object]) -> float:
        if self.device.type != "cuda":
            began = time.perf_counter()
            run()
            return max(1e-9, time.perf_counter() - began)
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        run()
        end.record()
        end.synchronize()
        return max(1e-9, float(begin.elapsed_time(end)) / 1000)

    def close(self) -> None:
        """Let go of everything, and remove the files of pools whose owners are dead."""
        self._kept.clear()
        self._last.close()
        sweep()
