"""Checks of the GPUs that workers are to compute on. Without --device cuda there are none."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from itertools import groupby

from prelay_kv.cuda.paths import CUDA_IPC, PINNED, Path

from ..host import SHM, size
from .cuda import Device
from .facts import Facts
from .finding import Finding, fail, ok, warn
from .gpus import Card
from .ongpus import Namespaces, OnGpus, Pinned
from .registry import Checks
from .toolchain import TorchBuild, Triton

checks = Checks("GPUs")

#: The first cards that multiply bfloat16, by their compute capability.
_BF16 = (8, 0)
_INSTALL = "install NVIDIA's driver; in a container give it the GPUs (--gpus all, with the NVIDIA Container Toolkit)"
#: What to do about an error of CUDA's runtime, by its code.
_ADVICE = {
    2: "others have all of its memory (nvidia-smi shows who): end them",
    35: f"no driver, or one that is older than this CUDA: {_INSTALL}, or install a torch for an older CUDA",
    46: "another process has the GPU for itself: stop it, or nvidia-smi -c DEFAULT",
    101: "CUDA_VISIBLE_DEVICES names a GPU that is not there",
    802: "start NVIDIA's fabric manager (nvidia-fabricmanager): GPUs behind an NVSwitch want it",
    803: "driver and library differ: load the new driver, or restart the machine",
    999: "load the module nvidia-uvm (nvidia-modprobe -u), or restart the machine",
}
_ADVICE_OTHERWISE = "does nvidia-smi work? dmesg shows what the driver has met"


@checks.of("torch", Facts.torch_build, "pip install prelay[workers] on Linux x86 brings a torch with CUDA and Triton")
def torch(found: TorchBuild) -> Finding:
    if found.cuda is None:
        return warn(f"{found.version}; its files do not say for which CUDA it is", "a build of PyTorch's says it")
    if not found.cuda:
        return fail(f"{found.version} was built without CUDA", "install a build with it: PyPI's for Linux x86 is one")
    return ok(f"{found.version} for CUDA {found.cuda}")


@checks.of("Triton", Facts.triton)
def triton(found: Triton) -> Finding:
    if not found.compiler:
        return fail(
            f"{found.version}; no C compiler, which starts its kernels", "Debian: apt install gcc libc6-dev; or set CC"
        )
    if not found.has_headers:
        return fail(f"{found.version}; no Python.h in {found.headers}", "install Python's headers (python3-dev)")
    if found.problem:
        return fail(
            f"{found.version}; kernels cannot be kept in {found.cache}: {found.problem}",
            "set TRITON_CACHE_DIR to a folder that can be written, from which programs can be loaded",
        )
    return ok(f"{found.version}, compiles with {found.compiler}, keeps kernels in {found.cache}")


@checks.of("CUDA runtime", Facts.on_gpus)
def runtime(found: OnGpus) -> Finding:
    cuda = found.cuda
    if cuda.devices:
        return ok(f"{cuda.library}, sees {len(cuda.devices)} GPU(s)")
    if cuda.problem:
        words = f"{cuda.library}: {cuda.problem}" if cuda.library else cuda.problem
        return fail(words, _advice(cuda.code) if cuda.library else "install a torch with CUDA, which brings libcudart")
    return fail(f"{cuda.library} sees no GPU", f"is CUDA_VISIBLE_DEVICES right? {_INSTALL}")


def _advice(code: int | None) -> str:
    return _ADVICE_OTHERWISE if code is None else _ADVICE.get(code, _ADVICE_OTHERWISE)


@checks.of("cards", Facts.visible)
def cards(found: OnGpus) -> Finding:
    """Each of them by its number: what it is, and whether workers can use it at all."""
    devices = found.cuda.devices
    if missing := [number for number in found.used if number >= len(devices)]:
        return fail(
            f"there is no GPU {_listed(missing)}: CUDA sees {len(devices)}, from 0",
            "--prefill-gpus and --decode-gpus name those that CUDA sees",
        )
    words = [_card(number, devices[number], found.cards.get(devices[number].uuid)) for number in found.used]
    for number in found.used:
        if problem := _card_problem(found, number):
            return replace(problem, found=f"{problem.found}. {'; '.join(words)}", items=tuple(words))
    return ok("; ".join(words), words)


def _card(number: int, device: Device, card: Card | None) -> str:
    free = f", {size(device.free)} of {size(device.total)} free" if device.total else ""
    if card is None:
        return f"{number}: {device.uuid[:12]}{free}"
    slices = ", cut into slices (MIG)" if card.has_mig else ""
    persistent = "" if card.is_persistent else ", persistence mode off (on, a start is quicker)"
    return f"{number}: {card.name}, {card.uuid[:12]}{free}{slices}{persistent}"


def _card_problem(found: OnGpus, number: int) -> Finding | None:
    device = found.cuda.devices[number]
    card = found.cards.get(device.uuid)
    several = sum(place.gpu == number for place in found.places.values()) > 1
    if card is not None and card.compute_mode == "Prohibited":
        return fail(f"GPU {number} computes for nobody", f"nvidia-smi -i {card.uuid} -c DEFAULT")
    if card is not None and card.compute_mode == "Exclusive_Process" and several:
        return fail(
            f"GPU {number} is for one process, and has several workers", f"nvidia-smi -i {card.uuid} -c DEFAULT"
        )
    if found.is_filled(number):
        return warn(
            f"GPU {number} cannot be looked at: the running prelay serve has all of it", "look when it is stopped"
        )
    if device.problem:
        return fail(f"GPU {number} cannot be used: {device.problem}", _advice(device.code))
    if not device.total:
        return fail(f"nothing is known of GPU {number}: {found.cuda.problem}", _ADVICE_OTHERWISE)
    if card is not None and card.capability and card.capability < _BF16 and found.dtype != "float32":
        return warn(f"GPU {number} is older than Ampere", "it has no bfloat16: --dtype float32, or another card")
    return None


@checks.of("shares", Facts.measured)
def shares(found: OnGpus) -> Finding:
    """What `prelay serve` gives each worker, and whether that is free."""
    words, short = [], []
    for number in found.used:
        device = found.device(number)
        if device is None:
            continue
        here = {name: place.share for name, place in found.places.items() if place.gpu == number}
        parts = [f"{name} {share:.0%} ({size(int(share * device.total))})" for name, share in here.items()]
        words.append(f"GPU {number}: {', '.join(parts)}")
        wanted = int(sum(here.values()) * device.total)
        if wanted > device.free and not found.is_running:
            short.append(f"of GPU {number} {size(device.free)} are free, and workers may take {size(wanted)}")
    if not words:
        return fail("nothing is known of the memory of the GPUs named", "see cards")
    if short:
        return warn(
            f"{'; '.join(short)}. {'; '.join(words)}",
            "end what else runs there (nvidia-smi), or a smaller --gpu-memory-utilization: pools take what is left",
            words,
        )
    return ok("; ".join(words), words)


@checks.of("peer access", Facts.between_gpus)
def peer_access(found: OnGpus) -> Finding:
    """From the card of each decode worker to that of each prefill worker."""
    apart = [f"{reader} → {owner}" for reader, owner in found.pairs if found.cuda.reaches.get((reader, owner)) is False]
    unknown = [pair for pair in found.pairs if pair not in found.cuda.reaches]
    if apart:
        return warn(
            f"none for {', '.join(apart)}: KV goes through {SHM} there", "cards with NVLink, or both roles on one card",
            apart,
        )  # fmt: skip
    if unknown:
        return fail(f"it cannot be told: {found.cuda.problem}", _ADVICE_OTHERWISE)
    return ok(f"decode workers' GPUs {_listed(r for r, _ in found.pairs)} reach {_listed(o for _, o in found.pairs)}")


@checks.of("KV path", Facts.prefilling)
def kv_path(found: OnGpus) -> Finding:
    """By which way KV leaves each prefill worker's card, as the worker will choose it."""
    paths = found.paths
    if missing := [number for number in found.prefilling if number not in paths]:
        why = next(filter(None, map(found.problem_of, missing)), "no reason was given")
        return fail(
            f"it cannot be told for GPU {_listed(missing)}: {why}",
            "--kv-transport pinned wants no other process to read a GPU's memory",
        )
    words = [f"GPU {_listed(numbers)}: {path.kind}, {path.reason}" for path, numbers in _alike(paths)]
    if any(path.kind == CUDA_IPC and not found.can_share(number) for number, path in paths.items()):
        return fail("; ".join(words), "--kv-transport auto or pinned", words)
    if found.transport != PINNED and found.by_pinned:
        return warn("; ".join(words), f"it works, but goes through the host's memory: see {SHM} for KV", words)
    return ok("; ".join(words), words)


def _alike(paths: Mapping[int, Path]) -> Iterable[tuple[Path, list[int]]]:
    ordered = sorted(paths, key=lambda number: (paths[number].kind, paths[number].reason, number))
    for path, numbers in groupby(ordered, key=lambda number: paths[number]):
        yield path, list(numbers)


@checks.of(f"{SHM} for KV", Facts.pinned)
def shared_memory(found: Pinned) -> Finding:
    """Room for the copies of prefill workers' blocks: a pool has its whole size from the start."""
    take = f"{size(found.free)} free, pools of {found.workers} prefill worker(s) take"
    larger = "a larger one (docker run --shm-size, shm_size in compose)"
    fits = found.free // found.workers // found.block
    if found.asked:
        words = f"{take} {size(found.asked * found.workers)}"
        enough = found.asked * found.workers <= found.free
        return ok(words) if enough else fail(words, f"{larger}, or --prefill-kv-blocks {fits}")
    if found.context * found.workers > found.free:
        words = f"{take} at least {size(found.context * found.workers)}, for a full context each"
        return fail(words, f"{larger}, or a smaller --max-model-len")
    words = f"{take} up to {size(found.most)}, as their GPUs leave it"
    return ok(words) if found.most <= found.free else warn(words, f"{larger}, or --prefill-kv-blocks {fits}")


@checks.of("namespaces", Facts.namespaces)
def namespaces(found: Namespaces) -> Finding:
    """CUDA tells processes by their numbers, and /dev/shm has the files that go with the memory."""
    return ok(
        f"{' and '.join(found.own)} of this container's own: workers in others must share "
        f"{'both' if len(found.own) > 1 else 'it'} (compose: pid and ipc; docker: --pid and --ipc container:NAME)"
    )


def _listed(numbers: Iterable[int]) -> str:
    return ", ".join(map(str, sorted(set(numbers))))
