"""Compiles for a GPU what the launchers of row kernels launch, where there is none; prints one JSON line a launch.

A program of its own: where Triton's interpreter is on, nothing is compiled.
"""

from __future__ import annotations

import json
import re
import subprocess
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from prelay_engine.gpu.kernels import linear, norm, sample, silu

#: Compute capability 9.0: H100, H200.
HOPPER = GPUTarget("cuda", 90, 32)
TYPES = {
    torch.float32: "*fp32",
    torch.float64: "*fp64",
    torch.bfloat16: "*bf16",
    torch.int32: "*i32",
    torch.int64: "*i64",
}


class Launches:
    """Takes a kernel's place: compiles it for the arguments of a launch, as the launch would have."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        self.compiled: list[Any] = []

    def __getitem__(self, _grid: object) -> Callable[..., None]:
        return self._launch

    def _launch(self, *args: Any, **named: Any) -> None:
        values = dict(zip(self.kernel.arg_names, args, strict=False)) | named
        types, constants, divisible = {}, {}, {}
        for place, param in enumerate(self.kernel.params):
            value = values.pop(param.name)
            free = isinstance(value, int) and not param.do_not_specialize
            if param.is_constexpr or value is None or (free and value == 1):
                types[param.name], constants[(place,)] = "constexpr", value
                continue
            types[param.name] = TYPES[value.dtype] if isinstance(value, torch.Tensor) else "i32"
            if isinstance(value, float):
                types[param.name] = "fp32"
            if isinstance(value, torch.Tensor) or (free and value % 16 == 0):
                divisible[(place,)] = [["tt.divisibility", 16]]
        # What is left are the launch's options: one that the compiler does not know is an error there.
        source = ASTSource(self.kernel, types, constants, divisible)
        self.compiled.append(triton.compile(source, target=HOPPER, options=values))


def launched(module: ModuleType, name: str, call: Callable[[], object]) -> None:
    kernel = getattr(module, name)
    launches = Launches(kernel)
    setattr(module, name, launches)
    try:
        call()
    finally:
        setattr(module, name, kernel)
    for compiled in launches.compiled:
        print(json.dumps(resources(compiled)), flush=True)


def resources(compiled: Any) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder, "kernel.cubin")
        cubin.write_bytes(compiled.asm["cubin"])
        tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
        usage = subprocess.run([tool, "-res-usage", cubin], capture_output=True, text=True, check=True).stdout
    held = {name: int(count) for name, count in re.findall(r"(REG|STACK):(\d+)", usage)}
    ptx = compiled.asm["ptx"]
    return {
        "name": compiled.metadata.name,
        "threads": compiled.metadata.num_warps * 32,
        "shared": compiled.metadata.shared,
        "registers": held["REG"],
        "spilled": held["STACK"],
        "wgmma": "wgmma.mma_async" in ptx,
        "ahead": "cp.async" in ptx,
    }


def main() -> None:
    half, single = torch.bfloat16, torch.float32
    for columns, dtype in ((4096, half), (28672, half), (4096, single)):
        x, weight = torch.empty(2, 4096, dtype=dtype), torch.empty(columns, 4096, dtype=dtype)
        launched(linear, "_linear", partial(linear.linear, x, weight, torch.empty(columns, dtype=dtype)))
    for width in (128, 4096, 14336):
        x = torch.empty(2, width, dtype=half)
        launched(norm, "_rms_norm", partial(norm.rms_norm, x, torch.empty(width), 1e-6))
    names: tuple[silu.Name, ...] = ("silu", "gelu", "gelu_tanh")
    for name in names:
        launched(silu, "_gated", partial(silu.silu_mul, torch.empty(2, 28672, dtype=half), name))
    one, two = torch.empty(2), torch.empty(2, dtype=torch.float64)
    count, out = torch.empty(2, dtype=torch.int32), torch.empty(2, dtype=torch.int64)
    for vocab in (1, 50257, 151936):
        launched(sample, "_sample", partial(sample.sample, torch.empty(2, vocab), one, count, two, one, two, out))


if __name__ == "__main__":
    main()
