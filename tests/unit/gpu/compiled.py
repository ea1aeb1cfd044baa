"""Compiles for a GPU what the attention launchers would launch, on a machine that has none; a JSON line a case.

A program of its own, given a JSON list of cases: where Triton's interpreter is on, nothing can be compiled.
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

#: Of each module, the kernels that its launchers start.
KERNELS = ((attention, "_attend"), (decode, "_decode"), (decode, "_combine"), (write_kv, "_write_kv"))

_TYPES = {
    torch.float32: "*fp32",
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.int32: "*i32",
    torch.int64: "*i64",
}
_OPTIONS = "num_warps", "num_stages", "enable_fp_fusion"


class Compiled:
    """Stands where a kernel stands, and compiles it for the arguments of each launch, as a launch would."""

    def __init__(self, kernel: Any, capability: int) -> None:
        self.kernel = kernel
        self.found: dict[str, Any] = {}  # by what tells one from another
        self._target = GPUTarget("cuda", capability, 32)

    def __getitem__(self, grid: object) -> Any:
        return self._compile

    def _compile(self, *args: Any, **kwargs: Any) -> None:
        options = {name: kwargs.pop(name) for name in _OPTIONS if name in kwargs}
        given = dict(zip(self.kernel.arg_names, args, strict=False)) | kwargs
        signature, constants, attributes = {}, {}, {}
        for index, param in enumerate(self.kernel.params):
            value = given[param.name]
            if param.is_constexpr or value is None or (self._specialised(param, value) and _number(value) == 1):
                signature[param.name], constants[(index,)] = "constexpr", value
                continue
            signature[param.name] = _type_of(value)
            if self._specialised(param, value) and _number(value) % 16 == 0:
                attributes[(index,)] = [["tt.divisibility", 16]]
        source = ASTSource(self.kernel, signature, constants, attributes)
        key = source.hash() + json.dumps(options)
        if key not in self.found:
            self.found[key] = triton.compile(source, target=self._target, options=options)

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
        "spilled": numbers["STACK"] + numbers["LOCAL"],
        "copies_of_16_bytes": len(re.findall(r"cp\.async\.cg", ptx)),
        "tensor_cores": "wgmma.mma_async" in ptx or "mma.sync" in ptx,
    }


def launch(case: dict[str, Any], layer: int, rows: int, blocks: int, window: int) -> None:
    """Call the launchers for a batch of `rows` rows and tables of `blocks` blocks, with a model of `case`."""
    dtype, dim, group, kv_heads = getattr(torch, case["dtype"]), case["dim"], case["group"], 2
    heads = kv_heads * group
    pool = torch.zeros(4, 20, 2, kv_heads, case.get("block_size", 16), dim, dtype=dtype)
    packed = torch.zeros(rows, heads + 2 * kv_heads, dim, dtype=dtype)
    query, keys, values = packed.split([heads, kv_heads, kv_heads], 1)
    form: dict[str, Any] = {
        "scale": 0.1,
        "window": window if case.get("windowed") else None,
        "softcap": case.get("softcap"),
        "sinks": torch.zeros(heads) if case.get("sinks") else None,
    }
    tables, lengths = torch.zeros(rows, blocks, dtype=torch.int32), torch.zeros(rows, dtype=torch.int32)
    for exact in (False, True):
        laid = tiles([(0, rows)], Shape.of(dim, dtype, group, exact).rows(group))
        attention.attend(pool, layer, query, laid, tables, torch.empty_like(query), exact=exact, **form)
    work = decode.scratch(rows, heads, dim, "cpu")
    decode.decode(pool, layer, query, tables, lengths, torch.empty_like(query), work, **form)
    write_kv.write_kv(pool, layer, keys, values, torch.zeros(rows, dtype=torch.int64))


def kernels(case: dict[str, Any]) -> list[Any]:
    """All that is compiled for the steps of one model: other layers, rows, tables and windows."""
    own = [getattr(module, name) for module, name in KERNELS]
    stand_ins = [Compiled(kernel, case.get("capability", 90)) for kernel in own]
    for (module, name), stand_in in zip(KERNELS, stand_ins, strict=True):
        setattr(module, name, stand_in)
    for step in ((1, 1, 1, 16), (0, 4, 16, 1), (16, 3, 7, 100)):
        launch(case, *step)
    for (module, name), kernel in zip(KERNELS, own, strict=True):
        setattr(module, name, kernel)
    return [compiled for stand_in in stand_ins for compiled in stand_in.found.values()]


if __name__ == "__main__":
    for case in json.loads(sys.argv[1]):
        print(json.dumps([resources(compiled) for compiled in kernels(case)]), flush=True)
