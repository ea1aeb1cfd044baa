"""The workers of a configuration on their GPUs, with what CUDA and the driver say of those."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from prelay_kv.cuda.paths import PINNED, Facts, choose
from prelay_kv.cuda.paths import Path as KvPath

from ..cards import Place
from ..host import SHM
from .cuda import Cuda, Device
from .gpus import Card

#: The code of an error: a card has no memory left, not even for a look.
_FULL = 2
#: The namespaces of the machine itself: a kernel's first have fixed inodes (its include/linux/proc_ns.h).
_FIRST = {"pid": "pid:[4026531836]", "ipc": "ipc:[4026531839]"}


@dataclass(frozen=True, slots=True)
class OnGpus:
    """Workers by name on their GPUs. `cards` is by the UUID, which driver and CUDA both have.

    `dtype` and `transport` are what is asked for. `is_running`: a running `prelay serve` has its memory already.
    """

    places: Mapping[str, Place]
    cuda: Cuda
    cards: Mapping[str, Card] = field(default_factory=dict)
    dtype: str = "auto"
    transport: str = "auto"
    is_running: bool = False

    @property
    def used(self) -> list[int]:
        """The GPUs that any worker is on."""
        return sorted({place.gpu for place in self.places.values()})

    @property
    def prefilling(self) -> list[int]:
        """Those that prefill workers are on."""
        return self._of("prefill")

    @property
    def pairs(self) -> list[tuple[int, int]]:
        """Two GPUs each: that of a decode worker, and another, of a prefill worker whose memory it reads."""
        return [(reader, owner) for reader in self._of("decode") for owner in self._of("prefill") if reader != owner]

    @property
    def paths(self) -> dict[int, KvPath]:
        """The path that a prefill worker on each GPU will choose, for those of which enough is known."""
        if self.transport == PINNED:
            return {number: choose(PINNED, Facts()) for number in self.prefilling}
        return {number: choose(self.transport, facts) for number, facts in self.cuda.facts.items()}

    @property
    def by_pinned(self) -> dict[str, Place]:
        """The prefill workers whose KV goes through host memory."""
        gpus = {number for number, path in self.paths.items() if path.kind == PINNED}
        return {name: place for name, place in self.places.items() if place.role == "prefill" and place.gpu in gpus}

    def is_filled(self, number: int) -> bool:
        """Whether a GPU cannot be looked at for the running `prelay serve`, which has all of it. That is no fault."""
        return self.is_running and self.cuda.devices[number].code == _FULL

    def can_share(self, number: int) -> bool:
        """Whether the decode workers of this command could read this GPU's memory. Other GPUs need not."""
        facts = self.cuda.facts[number]
        reached = all(self.cuda.reaches.get(pair, True) for pair in self.pairs if pair[1] == number)
        return reached and not facts.mig and (facts.probe is None or facts.probe.ok)

    def device(self, number: int) -> Device | None:
        """A GPU whose memory is known."""
        found = self.cuda.devices[number] if number < len(self.cuda.devices) else None
        return found if found is not None and found.total else None

    def total(self, number: int) -> int:
        """Bytes of a GPU's memory, 0 where they are not known."""
        found = self.device(number)
        return found.total if found else 0

    def problem_of(self, number: int) -> str:
        """Why not more is known of a GPU."""
        own = self.cuda.devices[number].problem if number < len(self.cuda.devices) else ""
        return own or self.cuda.problem

    def _of(self, role: str) -> list[int]:
        return sorted({place.gpu for place in self.places.values() if place.role == role})


@dataclass(frozen=True, slots=True)
class Pinned:
    """Pools of `workers` prefill workers whose KV goes through the `free` bytes of /dev/shm. Bytes of each: those asked
    for (0: as many as fit), those of one full context, and of one block. `most` is what their GPUs leave to all."""

    workers: int
    free: int
    asked: int
    context: int
    most: int
    block: int


@dataclass(frozen=True, slots=True)
class Namespaces:
    """What this process has apart from the machine's other processes, in words."""

    own: tuple[str, ...]


def own_namespaces() -> tuple[str, ...]:
    """Return those that matter to the hand-over and are a container's."""
    words = {"pid": "process numbers", "ipc": str(SHM)}
    return tuple(words[kind] for kind in words if _namespace(kind) != _FIRST[kind])


def _namespace(kind: str) -> str:
    try:
        return str(Path(f"/proc/self/ns/{kind}").readlink())
    except OSError:
        return _FIRST[kind]
