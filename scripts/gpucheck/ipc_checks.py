"""KV pools on the card, between processes that live and that are killed."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial

import torch

from prelay_kv.cuda.copies import Copier
from prelay_kv.cuda.mapping import CudaMapping
from prelay_kv.cuda.mirror import Mirror
from prelay_kv.cuda.paths import CUDA_IPC
from prelay_kv.cuda.pool import CudaPool
from prelay_kv.cuda.probe import choose_path, run_probe
from prelay_kv.errors import CudaError, SegmentGone, StaleKv
from prelay_kv.importer import Importer
from prelay_kv.layout import KvLayout
from prelay_kv.ref import KvRef
from prelay_kv.segment import SHM_DIR
from prelay_kv.shm import ShmPool

from .found import Found, Wrong, aimed, need, passed
from .pattern import fill, wrong_blocks
from .peers import Partner
from .pools import importer, layout
from .rig import Rig

#: Bytes a second that a hand-over on one card should reach.
_AIM = 1e12
#: What a driver may keep of freed memory, or take for something else meanwhile, as a share of a pool.
_LOOSE = 0.1
#: The driver gives a dead process's memory back a little later, seconds.
_LATER_S = 10.0
_DEVICE_UNINITIALIZED = 201


class Exporter:
    """A process with a pool, and what its blocks hold."""

    def __init__(self, rig: Rig, partner: Partner, owner: str, nbytes: int, seed: int) -> None:
        self.partner, self.seed, self.layout = partner, seed, layout(rig, nbytes)
        self.owner = f"{owner}-{os.getpid()}"
        self.ref = KvRef.decode(partner.ask("export", self.owner, asdict(self.layout), seed).encode())


class Taken:
    """A copy function: blocks come into memory of this process, in their order."""

    def __init__(self, rig: Rig, ref: KvRef) -> None:
        dtype = getattr(torch, ref.layout.dtype)
        self._rig, self._ref = rig, ref
        self.target = torch.zeros(len(ref.blocks), *ref.layout.shape[1:], dtype=dtype, device=rig.device)
        rig.wait()

    def __call__(self, pool: torch.Tensor, blocks: Sequence[int]) -> None:
        _copier(self._rig).copy(
            pool.data_ptr(), blocks, self.target.data_ptr(), range(len(blocks)), self._ref.layout.block_nbytes
        )

    def wrong(self, seed: int) -> int:
        return wrong_blocks(self.target, self._ref.blocks, seed)


def _copier(rig: Rig) -> Copier:
    return rig.once("copier", lambda: Copier(rig.runtime(), rig.index), Copier.close)


def _importer(rig: Rig) -> Importer:
    return rig.once("importer", lambda: importer(rig, layout(rig, 1)), Importer.close)


def _partners(rig: Rig) -> list[Partner]:
    """All other processes of this part, which start together and are up before memory is looked at."""

    def make() -> list[Partner]:
        rig.runtime()
        made = [Partner(rig.rehearse) for _ in range(5)]
        for partner in made:
            partner.wait()
        return made

    def end(made: list[Partner]) -> None:
        for partner in made:
            partner.end()

    return rig.once("partners", make, end)


def _main(rig: Rig) -> Exporter:
    """The exporter of most checks: 4 GiB."""
    most = rig.pick(4 << 30, 1 << 20)
    nbytes = min(most, int(rig.free() * 0.3))
    return rig.once("exporter", lambda: Exporter(rig, _partners(rig)[0], "main", nbytes, seed=1))


def copy(rig: Rig) -> Found:
    """First a quarter of the pool in any order, then all of it."""
    exporter = _main(rig)
    picked = random.Random(1).sample(range(len(exporter.ref.blocks)), max(2, len(exporter.ref.blocks) // 4))
    some = KvRef(
        exporter.ref.segment, tuple(picked), tuple(exporter.ref.generations[block] for block in picked),
        len(picked) * exporter.layout.block_size, exporter.layout,
    )  # fmt: skip
    for ref in (some, exporter.ref):
        taken = Taken(rig, ref)
        _importer(rig).fetch(ref, taken)
        need(taken.wrong(seed=2) == len(ref.blocks), "a comparison that can see no difference")
        wrong = taken.wrong(exporter.seed)
        need(wrong == 0, f"{wrong} of {len(ref.blocks)} blocks are not what the exporter wrote")
    return passed(f"{_gib(exporter.layout.nbytes)} in {len(exporter.ref.blocks)} blocks")


def contiguous(rig: Rig) -> Found:
    blocks = range(len(_main(rig).ref.blocks))
    return _speed(rig, blocks, blocks)


def scattered(rig: Rig) -> Found:
    blocks = range(len(_main(rig).ref.blocks))
    return _speed(rig, *(random.Random(seed).sample(blocks, len(blocks)) for seed in (1, 2)))


def _speed(rig: Rig, there: Sequence[int], here: Sequence[int]) -> Found:
    """How fast the first so many blocks of `there` become those of `here`, in memory of this process."""
    exporter = _main(rig)
    ref, nbytes = exporter.ref, exporter.layout.block_nbytes
    counts = [count for mib in (64, 256, 1024, 4096) if (count := (mib << 20) // nbytes) <= len(ref.blocks)]
    counts = rig.pick(counts or [len(ref.blocks)], [len(ref.blocks)])
    target = Taken(rig, ref).target
    found: dict[int, float] = {}

    def run(pool: torch.Tensor, _: Sequence[int]) -> None:
        source, copier = pool.data_ptr(), _copier(rig)
        for count in counts:
            once = partial(copier.copy, source, there[:count], target.data_ptr(), here[:count], nbytes)
            found[count * nbytes] = speed = count * nbytes / _median(rig, once)
            rig.say(f"{_gib(count * nbytes)}: {_speed_of(speed)}")

    _importer(rig).fetch(ref, run)
    last = counts[-1]
    wrong = wrong_blocks(target[torch.tensor(here[:last], device=rig.device)], there[:last], exporter.seed)
    need(wrong == 0, f"{wrong} of {last} blocks are wrong")
    figure = ", ".join(f"{_gib(size)}: {_speed_of(speed)}" for size, speed in found.items())
    reached = rig.rehearse or found[max(found)] >= _AIM
    return aimed(reached, figure, bytes_per_s={str(size): speed for size, speed in found.items()})


def _median(rig: Rig, run: Callable[[], object]) -> float:
    """By the host's clock: a copier's copies have ended when it returns."""
    times = []
    for _ in range(rig.pick(7, 1)):
        began = time.perf_counter()
        run()
        times.append(time.perf_counter() - began)
    return sorted(times)[len(times) // 2]


def exporter_killed(rig: Rig) -> Found:
    exporter = Exporter(rig, _partners(rig)[1], "killed", rig.pick(2 << 30, 1 << 20), seed=11)
    _fetched(rig, exporter, "before")
    exporter.partner.kill()
    time.sleep(rig.pick(1.0, 0.0))  # what is to go with the process has gone by then, and what is pinned has not
    _fetched(rig, exporter, "after its exporter's death")
    need(exporter.owner in _importer(rig).orphans(), "the importer does not know that its owner is dead")
    pinned = rig.free()
    _importer(rig).forget(exporter.owner)
    freed = _freed(rig, pinned, exporter.layout)
    try:
        _importer(rig).fetch(exporter.ref, Taken(rig, exporter.ref))
    except SegmentGone:
        return passed(f"{_gib(freed)} came back when it was unmapped", freed=freed)
    raise Wrong("a dead exporter's memory was mapped anew")


def _fetched(rig: Rig, exporter: Exporter, when: str) -> None:
    taken = Taken(rig, exporter.ref)
    _importer(rig).fetch(exporter.ref, taken)
    wrong = taken.wrong(exporter.seed)
    need(wrong == 0, f"{wrong} of {len(exporter.ref.blocks)} blocks are wrong {when}")
    del taken
    rig.tidy()


def _freed(rig: Rig, before: int, of: KvLayout) -> int:
    """How much more is free than `before`. Wrong unless it is a whole pool before long."""
    until = time.monotonic() + rig.pick(_LATER_S, 1.0)
    freed = 0
    while time.monotonic() < until:
        freed = rig.free() - before
        if freed >= (1 - _LOOSE) * of.nbytes:
            return freed
        time.sleep(0.05)
    raise Wrong(f"{_gib(freed)} of a pool of {_gib(of.nbytes)} came back")


def importer_killed(rig: Rig) -> Found:
    mine, other = _partners(rig)[2], _partners(rig)[4]
    exporter = Exporter(rig, mine, "survivor", rig.pick(2 << 30, 1 << 20), seed=21)
    said = other.ask("fetch", exporter.ref.encode().decode(), exporter.seed)
    need(said["wrong"] == 0, f"{said['wrong']} blocks came wrong")
    need(mine.ask("mapped"), "the exporter does not see that it is mapped")
    other.kill()
    until = time.monotonic() + _LATER_S
    while mine.ask("mapped"):
        need(time.monotonic() < until, "the exporter still counts a dead importer")
        time.sleep(0.05)
    exporter.ref, exporter.seed = KvRef.decode(mine.ask("refill", 22).encode()), 22
    _fetched(rig, exporter, "after an importer's death")
    _importer(rig).forget(exporter.owner)
    before = rig.free()
    mine.ask("close")
    freed = _freed(rig, before, exporter.layout)
    return passed(f"{_gib(freed)} came back when it was closed", freed=freed)


def writer_killed(rig: Rig) -> Found:
    exporter = Exporter(rig, _partners(rig)[3], "writer", rig.pick(1 << 30, 1 << 20), seed=31)
    _fetched(rig, exporter, "before")
    half = len(exporter.ref.blocks) // 2
    exporter.partner.ask("overwrite", half)
    exporter.partner.kill()
    try:
        _importer(rig).fetch(exporter.ref, Taken(rig, exporter.ref))
    except StaleKv as error:
        need(
            error.blocks == tuple(range(half, len(exporter.ref.blocks))),
            "other blocks than those overwritten are stale",
        )
    else:
        raise Wrong("overwritten blocks were taken for whole")
    kept = KvRef(
        exporter.ref.segment, exporter.ref.blocks[:half], exporter.ref.generations[:half],
        half * exporter.layout.block_size, exporter.layout,
    )  # fmt: skip
    taken = Taken(rig, kept)
    _importer(rig).fetch(kept, taken)
    need(taken.wrong(exporter.seed) == 0, "blocks that nobody overwrote have changed")
    _importer(rig).forget(exporter.owner)
    return passed(f"{half} blocks refused, {half} whole")


def own_handle(rig: Rig) -> Found:
    place, runtime = str(rig.device), rig.runtime()
    pool = CudaPool.create(f"own-{os.getpid()}", layout(rig, 8 << 20), runtime, rig.index, torch_device=place)
    try:
        ref = pool.ref(range(2), pool.generations[:2], 1)
        try:
            mapping = CudaMapping.open(ref, runtime=runtime, device=rig.index, torch_device=place)
        except SegmentGone as error:
            need(f"({_DEVICE_UNINITIALIZED})" in str(error) and "very process" in str(error), f"it says: {error}")
        else:
            mapping.close()
            raise Wrong("it was opened")
        handle = runtime.ipc_handle(pool.tensor.data_ptr())
        try:
            runtime.ipc_open(handle)
        except CudaError as error:
            need(error.code == _DEVICE_UNINITIALIZED and not error.fatal, f"the runtime says: {error}")
        else:
            raise Wrong("the runtime opened it")
        need(float(torch.ones(4, device=rig.device).sum()) == 4.0, "the error is left behind")
    finally:
        pool.close()
    return passed("201, and nothing is left of it")


def probe(rig: Rig) -> Found:
    result = run_probe(rig.runtime(), rig.index)
    need(result.ok, f"the probe: {result.what}")
    path = choose_path("auto", rig.runtime(), rig.index)
    need(path.kind == CUDA_IPC, f"auto is {path.kind}: {path.reason}")
    return passed(f"{path.kind}, {rig.runtime().path}")


def pinned(rig: Rig) -> Found:
    room = os.statvfs(SHM_DIR)
    nbytes = min(rig.pick(1 << 30, 1 << 20), room.f_bavail * room.f_frsize // 2)
    of = layout(rig, nbytes)
    host = ShmPool.create(f"mirror-{os.getpid()}", of)
    tensor = torch.zeros(of.shape, dtype=getattr(torch, of.dtype), device=rig.device)
    fill(tensor, 41)
    rig.wait()
    mirror = Mirror(tensor, host, rig.runtime(), rig.index)
    try:
        blocks = range(of.num_blocks)
        began = time.perf_counter()
        mirror.copy(blocks, [int(each) for each in host.generations])
        out = of.nbytes / (time.perf_counter() - began)
        ref = host.ref(blocks, host.generations, of.num_blocks * of.block_size)
        said = _partners(rig)[0].ask("fetch", ref.encode().decode(), 41)
        need(said["wrong"] == 0, f"{said['wrong']} of {of.num_blocks} blocks came wrong")
        figure = (
            f"{_gib(of.nbytes)} out {_speed_of(out)} ({'pinned' if mirror.pinned else 'not pinned'}), "
            f"in {_speed_of(said['nbytes'] / said['seconds'])} ({said['mapping']})"
        )
    finally:
        mirror.close()
        host.close()
    return passed(figure, out=out, into=said["nbytes"] / said["seconds"], pinned=mirror.pinned)


def _gib(nbytes: float) -> str:
    return f"{nbytes / 2**30:.1f} GiB" if nbytes >= 2**30 else f"{nbytes / 2**20:.0f} MiB"


def _speed_of(bytes_per_s: float) -> str:
    return f"{bytes_per_s / 1e9:.0f} GB/s"


RUNS = {
    "copy": copy,
    "contiguous": contiguous,
    "scattered": scattered,
    "exporter-killed": exporter_killed,
    "importer-killed": importer_killed,
    "writer-killed": writer_killed,
    "own-handle": own_handle,
    "probe": probe,
    "pinned": pinned,
}
