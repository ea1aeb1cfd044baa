"""What CUDA's runtime says of the GPUs, asked in a process of its own: a driver may hang, or take a process with it.

python -m prelay.gpulook JSON    prints a line of JSON for each fact, as soon as it has it; doctor/cuda.py reads them

It imports no torch, and little of the command line, so that it starts at once.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from prelay_kv.cuda.probe import gather
from prelay_kv.cuda.runtime import Cudart
from prelay_kv.errors import CudaError, NoCudaRuntime

Fact = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Question:
    """GPUs by their numbers: those that are `used`, pairs of which the first reads the second's memory, and those whose
    memory another process must be able to read. It ends after `limit_s` seconds, whether it is waited for or not."""

    used: tuple[int, ...]
    pairs: tuple[tuple[int, int], ...]
    probed: tuple[int, ...]
    limit_s: int

    def encode(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def decode(cls, text: str) -> Question:
        data = json.loads(text)
        pairs = tuple((reader, owner) for reader, owner in data["pairs"])
        return cls(tuple(data["used"]), pairs, tuple(data["probed"]), data["limit_s"])


def facts(question: Question) -> Iterator[Fact]:
    """1. The library. 2. The devices that it sees. 3. Memory of those used. 4. Who reaches whom. 5. The probes.

    A device that is not there, or fails in 3, has no later fact.
    """
    runtime = _runtime()
    yield {"library": runtime.path}  # 1
    uuids = [runtime.device_uuid(device) for device in range(runtime.device_count())]
    yield {"uuids": uuids}  # 2
    sound = []
    for device in question.used:
        if device < len(uuids):
            found = _of(runtime, device, _memory)
            yield found  # 3
            sound += [] if "problem" in found else [device]
    for reader, owner in question.pairs:
        if reader < len(uuids) and owner < len(uuids):
            yield {"reader": reader, "owner": owner, "reaches": runtime.can_access_peer(reader, owner)}  # 4
    for device in question.probed:
        if device in sound:
            yield _of(runtime, device, _facts_of)  # 5


def _runtime() -> Cudart:
    """The one that comes with torch, if any does: a worker has loaded that when it looks for one, and this process has
    not. The linker may know another, which asks more of the driver."""
    spec = None if os.environ.get("PRELAY_CUDART") else find_spec("torch")
    packages = Path(spec.origin).parents[1] if spec and spec.origin else None
    for pattern in ("nvidia/*/lib/libcudart.so.*", "torch/lib/libcudart*.so*"):
        for path in sorted(packages.glob(pattern), reverse=True) if packages else ():
            try:
                return Cudart(path)
            except NoCudaRuntime:
                continue
    return Cudart.find()


def _of(runtime: Cudart, device: int, find: Callable[[Cudart, int], Fact]) -> Fact:
    try:
        return {"device": device, **find(runtime, device)}
    except CudaError as error:
        return {"device": device, "problem": str(error), "code": error.code}


def _memory(runtime: Cudart, device: int) -> Fact:
    runtime.set_device(device)
    free, total = runtime.memory()
    return {"free": free, "total": total}


def _facts_of(runtime: Cudart, device: int) -> Fact:
    return {"facts": asdict(gather(runtime, device))}


def main() -> None:
    question = Question.decode(sys.argv[1])
    signal.setitimer(signal.ITIMER_REAL, question.limit_s)  # SIGALRM ends it, should nobody else
    try:
        for fact in facts(question):
            print(json.dumps(fact), flush=True)
    except (CudaError, NoCudaRuntime) as error:
        print(json.dumps({"problem": str(error), "code": getattr(error, "code", None)}), flush=True)


if __name__ == "__main__":
    main()
