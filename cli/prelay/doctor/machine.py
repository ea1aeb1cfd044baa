"""Checks of the machine."""

from __future__ import annotations

import sys
from importlib import metadata

from prelay_engine.cpu import Cpu

from .. import __version__
from ..errors import BadUsage, TooSmall
from ..host import SHM, size
from ..settings import Settings, unknown_variables
from .facts import Facts, Native, Placement, Pools, Processor, Swept
from .finding import Finding, fail, ok, some, warn
from .gpus import Gpus
from .registry import Checks

checks = Checks("this machine")

#: Up to so many, both phases compete for all of them (docs/performance.md).
_FEW_CORES = 4
#: Features worth showing, as the kernel names them, the best of a kind first.
_FEATURES = ("amx_bf16", "avx512_bf16", "avx512_vnni", "avx512f", "avx2", "bf16", "sve", "asimd")


@checks.of("python", Facts.settings)
def python(_: Settings) -> Finding:
    version = ".".join(map(str, sys.version_info[:3]))
    if not sys.platform.startswith("linux"):
        return fail(f"{version} on {sys.platform}", "Prelay needs Linux")
    return ok(f"{version} ({sys.executable}); prelay {__version__}, torch {_installed('torch')}")


def _installed(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "missing"


@checks.of("environment", Facts.settings)
def environment(_: Settings) -> Finding:
    if unknown := unknown_variables():
        return warn(f"unknown: {', '.join(unknown)}", "misspelt? prelay serve --help names all", unknown)
    return ok("no unknown PRELAY_ variables")


@checks.of("CPU", Facts.processor)
def cpu(found: Processor) -> Finding:
    words = f"{found.host.cores} core(s), {_features(found.cpu)}"
    if not found.computes:
        return ok(words)
    words += "; "
    if found.host.has_bf16:
        return ok(f"{words}multiplies bfloat16 in hardware")
    if found.dtype == "bfloat16":
        return warn(f"{words}no bfloat16 products", "--dtype bfloat16 is slower here than float32: leave it at auto")
    return ok(f"{words}no bfloat16 products: --dtype auto is float32")


def _features(cpu: Cpu) -> str:
    found = [name for name in _FEATURES if name in cpu.flags]
    return " ".join(found) if found else "no features known"


@checks.of("GPU", Facts.gpus)
def gpu(found: Gpus) -> Finding:
    if found.is_wanted:
        return _wanted_gpu(found)
    if not found.lines:
        return ok(f"none ({found.why}): workers run on the CPU")
    return ok(f"{'; '.join(found.lines)}: not used without --device cuda", found.lines)


def _wanted_gpu(found: Gpus) -> Finding:
    if found.lines:
        return ok("; ".join(found.lines), found.lines)
    if found.seen:
        return warn(
            f"{found.why}, though CUDA sees {found.seen}",
            "less is known of them so: in a container, NVIDIA_DRIVER_CAPABILITIES=compute,utility",
        )
    return fail(
        f"none ({found.why}), and --device cuda wants one",
        "install NVIDIA's driver, in a container give it the GPUs (--gpus all), or leave --device at cpu",
    )


@checks.of("kernels", Facts.native)
def kernels(found: Native) -> Finding:
    if found.kernels == "torch":
        return ok("torch computes, as --kernels says: two to four times slower than native ones")
    eight = "" if found.quantization == "none" else f"; weights as {found.quantization}"
    if found.shipped:
        return ok(f"native, as they came with the package ({found.shipped}), since {found.problem}{eight}")
    if found.problem:
        advice = "install one (Debian: apt install g++), or name it in $CXX"
        if found.kernels == "native" or found.quantization != "none":
            return fail(f"{found.problem}, and --kernels native or --quantization wants one", advice)
        return warn(f"{found.problem}: torch computes, two to four times slower", advice)
    when = "compiled" if found.is_compiled else "to be compiled at the first start, in some ten seconds,"
    return ok(f"native, {when} by {found.compiler}{eight}")


@checks.of("workers", Facts.placement)
def workers(found: Placement) -> Finding:
    counts = {"prefill": found.prefill, "decode": found.decode, "unified": found.unified}
    words = ", ".join(f"{count} {kind}" for kind, count in counts.items() if count)
    words += f"; {found.threads} thread(s) each on {found.cores} core(s), which the API and Redis share"
    if found.prefill and found.cores <= _FEW_CORES and not found.on_gpus:
        words += ". On few cores --unified 1 gives more tokens a second, and --decode-nice 0 evener ones"
    return ok(words)


@checks.of("memory", Facts.pools)
def memory(pools: Pools) -> Finding:
    host, problem = pools.host, pools.problem
    found = f"{size(host.memory_free)} free of {size(host.memory)}"
    if isinstance(problem, BadUsage) or (isinstance(problem, TooSmall) and problem.where != str(SHM)):
        return fail(f"{found}: {problem}")
    if pools.on_gpus:
        return ok(f"{found}; KV lies on the GPUs")
    if pools.planned is None:
        return ok(f"{found}; {_untold(pools, str(SHM))}")
    planned = pools.planned
    found += f": decode pools of {planned.kv_blocks} blocks grow to {size(pools.decode)} in all"
    if pools.decode + pools.prefill > host.memory_free:
        return warn(found, "with the prefill pools that is more than is free: a smaller --kv-blocks")
    return ok(found)


@checks.of(str(SHM), Facts.pools)
def shared_memory(pools: Pools) -> Finding:
    if not pools.shm and not pools.host.shm_free:
        if pools.planned is not None and not pools.planned.prefill_kv_blocks:
            return ok("not there, and no prefill worker needs it")
        return fail("not there", f"prefill workers hand KV over in it: mount a tmpfs at {SHM}")
    found = f"{size(pools.host.shm_free)} free of {size(pools.shm)}"
    if isinstance(pools.problem, TooSmall) and pools.problem.where == str(SHM):
        return fail(f"{found}: {pools.problem}", "docker run --shm-size, shm_size in compose; or smaller pools")
    if pools.on_gpus:
        return ok(f"{found}; KV lies on the GPUs, and goes through it only by the pinned path")
    if pools.planned is None:
        return ok(f"{found}; {_untold(pools, 'memory')}")
    return ok(f"{found}: prefill pools of {pools.planned.prefill_kv_blocks} blocks take {size(pools.prefill)} in all")


def _untold(pools: Pools, other: str) -> str:
    why = "the model cannot be read" if pools.problem is None else f"see {other}"
    return f"what the pools take cannot be told: {why}"


@checks.of("KV segments", Facts.segments)
def segments(swept: Swept) -> Finding:
    """Those of dead workers: the lock of a live one's is held."""
    found, removed = swept.segments, swept.removed
    words = f"{len(found.used)} in use ({size(sum(found.used.values()))})"
    if found.closed:
        words += f", {len(found.closed)} of other users"
    if removed:
        words += f"; removed {len(removed)} left by dead workers: {some(removed)}"
    if found.left:
        left = sorted(found.left)
        words += f"; {len(left)} left by dead workers ({size(sum(found.left.values()))}): {some(left)}"
        return warn(words, "prelay doctor --fix removes them, and so does the next prelay serve", left)
    return ok(words if removed else f"{words}, none left by dead workers", removed)
