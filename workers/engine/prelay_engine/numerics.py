"""What the bits of a result depend on besides the model and its input."""

from __future__ import annotations

import hashlib
import json
import platform
import re
from typing import Any

import torch
import transformers

from .cpu import multiplies_bfloat16, this_cpu

#: x86 and ARM features that select other kernels in oneDNN, MKL or torch.
_FEATURES = re.compile(r"^(avx|amx|fma|f16c|asimd|sve|sme|i8mm|bf16)")


def digest(facts: dict[str, Any]) -> str:
    """A short hex string that is equal for equal facts in every process."""
    text = json.dumps(facts, sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def machine_facts() -> dict[str, Any]:
    """The instruction set as the kernels see it, and the versions of what holds the kernels."""
    build = torch.__config__.show()
    return {
        "machine": platform.machine(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "cpu": _cpu(),
        "torch": torch.__version__,
        "onednn": _version(build, r"MKL-DNN v([\w.]+)"),
        "mkl": _version(build, r"Math Kernel Library Version ([\w.-]+)"),
        "transformers": transformers.__version__,
    }


def _version(build: str, pattern: str) -> str:
    found = re.search(pattern, build)
    return found.group(1) if found else "none"


def _cpu() -> list[str]:
    """Maker and features: MKL chooses by both."""
    cpu = this_cpu()
    return cpu.vendor.split() + sorted(name for name in cpu.flags if _FEATURES.match(name))


def native_bfloat16_matmul() -> bool:
    """Whether bfloat16 is the faster choice here: the CPU has its products, and this build of torch uses them."""
    if not (torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()):
        return False
    return multiplies_bfloat16(this_cpu().flags)
