"""What this CPU can do, read without torch: the command sizes pools before any worker has loaded a model."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

#: Without these oneDNN refuses bfloat16 weights on x86, whatever else the CPU has.
_X86_BASE = frozenset({"avx512bw", "avx512vl", "avx512dq"})


@dataclass(frozen=True, slots=True)
class Cpu:
    """The first core of /proc/cpuinfo: its maker ("" where none is named) and its features as the kernel names them."""

    vendor: str = ""
    flags: frozenset[str] = frozenset()


def this_cpu(path: Path = Path("/proc/cpuinfo")) -> Cpu:
    """Return an empty Cpu where the file cannot be read."""
    try:
        core = path.read_text().split("\n\n", 1)[0]
    except OSError:
        return Cpu()
    fields = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in core.splitlines())}
    return Cpu(fields.get("vendor_id", ""), frozenset((fields.get("flags") or fields.get("Features") or "").split()))


def multiplies_bfloat16(flags: Collection[str]) -> bool:
    """Whether a CPU with these features has bfloat16 products in hardware, so that bfloat16 is the faster choice.

    AVX-512 alone is not enough: oneDNN takes bfloat16 there and widens each weight before it multiplies.
    """
    if "bf16" in flags:  # Arm
        return True
    return _X86_BASE.issubset(flags) and ("avx512_bf16" in flags or "amx_bf16" in flags)
