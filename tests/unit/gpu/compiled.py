"""Compiles for a GPU what the attention launchers would launch, on a machine that has none; one JSON line a kernel.

A program of its own: where Triton's interpreter is on nothing is compiled.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from prelay_engine.gpu.kernels import attention, decode, write_kv
from prelay_engine.gpu.kernels.tiles import Shape, tiles

#: Compute capability 9.0: Hopper.
TARGET = GPUTarget("cuda", 90, 32)

_TYPES = {
    torch.float32: "*fp32",
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.int32: "*i32",
    torch.int64: "*i64",
}
_OPTIONS = "num_warps", "num_stages", "enable_fp_fusion"


class Compiled:
    """Stands where a kernel stands, and compiles it for the arguments of each launch."""

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel
        self.found: list[Any] = []

    def __getitem__(self, grid: object) -> Any:
        return self._compile

    def _compile(self, *args: Any, **kwargs: Any) -> None:
        options = {name: kwargs.pop(name) for name in _OPTIONS if name in kwargs}
        given = dict(zip(self._kernel.arg_names, args, strict=False)) | kwargs
        signature, constants, attributes = {}, {}, {}
        for index, param in enumerate(self._kernel.params):
            value = given[param.name]
            if param.is_constexpr or value is None or (self._specialised(param, value) and _number(value) == 1):
                signature[param.name], constants[(index,)] = "constexpr", value
                continue
            signature[param.name] = _type_of(value)
            if self._specialised(param, value) and _number(value) % 16 == 0:
                attributes[(index,)] = [["tt.divisibility", 16]]
        source = ASTSource(self._kernel, signature, constants, attributes)
        self.found.append(triton.compile(source, target=TARGET, options=options))

    @staticmethod
    def _specialised(param: Any, value: Any) -> bool:
        if isinstance(value, torch.Tensor):
            return not param.do_not_specialize_on_alignment
        return isinstance(value, int) and not param.do_not_specialize


def _number(value: Any) -> int:
    return value.data_ptr() if isinstance(value, torch.Tensor) else value


def _type_of(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return _TYPES[value.dtype]
    if isinstance(value, float):
        return "fp32"
    return "i32" if -(2**31) <= value < 2**31 else "i64"


def resources(compiled: Any) -> dict[str, Any]:
    """What one program takes of a multiprocessor: bytes of shared memory, registers and bytes spilled a thread."""
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder, "kernel.cubin")
        cubin.write_bytes(compiled.asm["cubin"])
        tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
        shown = subprocess.run([tool, "-res-usage", cubin], capture_output=True, text=True, check=True).stdout
    numbers = {name: int(count) for name, count in re.findall(r"(REG|STACK|LOCAL):(\d+)", shown)}
    ptx = compiled.asm["ptx"]
    return {
        "kernel": compiled.metadata.name,
        "warps": compiled.metadata.num_warps,
        "shared": compiled.metadata.shared,
        "registers": numbers["REG"],
        "stack": numbers["STACK"] + numbers["LOCAL"],
        "wide_copies": len(re.findall(r"cp\.async\S*\s.*, 0x10|cp\.async\.cg", ptx)),
        "wgmma": "wgmma.mma_async" in ptx,
        "mma": "mma.sync" in ptx,
    }


def launch(case: dict[str, Any]) -> list[Compiled]:
    """Call the launchers as for a model of `case`, with kernels that are compiled and not run."""
    dtype, dim, group, kv_heads = getattr(torch, case["dtype"]), case["dim"], case["group"], 2
    pool = torch.zeros(4, 2, 2, kv_heads, case.get("block_size", 16), dim, dtype=dtype)
    query = torch.zeros(4, kv_heads * group, dim, dtype=dtype)
    sinks = torch.zeros(kv_heads * group) if case.get("sinks") else None
    form: dict[str, Any] = {"scale": 0.1, "window": case.get("window"), "softcap": case.get("softcap"), "sinks": sinks}
    tables, lengths = torch.zeros(4, 1, dtype=torch.int32), torch.zeros(4, dtype=torch.int32)
    places = [(attention, "_attend"), (decode, "_decode"), (decode, "_combine"), (write_kv, "_write_kv")]
    kernels = [Compiled(getattr(module, name)) for module, name in places]
    for (module, name), kernel in zip(places, kernels, strict=True):
        setattr(module, name, kernel)
    for exact in (False, True):
        laid = tiles([(0, 4)], Shape.of(dim, dtype, group, exact).rows(group))
        attention.attend(pool, 1, query, laid, tables, query.clone(), exact=exact, **form)
    decode.decode(
        pool, 1, query, tables, lengths, query.clone(), decode.scratch(4, kv_heads * group, dim, "cpu"), **form
    )
    write_kv.write_kv(
        pool,
        1,
        query[:, :kv_heads],
        query[:, kv_heads:][:, :kv_heads] if group > 1 else query,
        torch.zeros(4, dtype=torch.int64),
    )
    for (module, name), kernel in zip(places, kernels, strict=True):
        setattr(module, name, kernel._kernel)
    return kernels


if __name__ == "__main__":
    for case in json.loads(sys.argv[1]):
        for kernel in launch(case):
            for compiled in kernel.found:
                print(json.dumps(case | resources(compiled)), flush=True)
