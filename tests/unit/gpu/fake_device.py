"""A GPU that is not there: tensors that have a shape, a dtype and a device `cuda:0`, and no numbers.

What would wait for the device on a real one, or mix tensors of it with the host's, is an error here. Kernels are not
run; their launches are noted. Nothing here can say whether a kernel is right.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from prelay_engine.config import GpuConfig
from prelay_engine.gpu import decoder as decoders
from prelay_engine.gpu.buffers import DecodeRows
from prelay_engine.gpu.kernels import attention, decode, linear, norm, sample, silu, write_kv
from prelay_engine.gpu.layers import Norm
from prelay_engine.gpu.model import GpuModel
from prelay_engine.loading import Prepared

CUDA = torch.device("cuda:0")

#: All kernels that launchers start.
KERNELS = (
    (attention, "_attend"), (decode, "_decode"), (decode, "_combine"), (linear, "_linear"), (norm, "_rms_norm"),
    (sample, "_sample"), (silu, "_gated"), (write_kv, "_write_kv"),
)  # fmt: skip

#: Kernels are compiled apart for multiples of 16, as all strides are that lead from head to head. In tiny models such
#: heads have 8 numbers.
_ALIKE = 8


@dataclass(slots=True)
class Launches:
    """Stands where a kernel stands, and notes for which constants and dtypes a launch would compile it."""

    name: str
    kernel: Any
    compiled: set[tuple[Any, ...]] = field(default_factory=set)

    def __getitem__(self, grid: Sequence[int]) -> Callable[..., None]:
        assert all(count > 0 for count in grid), (self.name, grid)
        assert grid[0] < 2**31, (self.name, grid)
        assert max(grid[1:], default=1) <= 65535, (self.name, grid)
        return self._launch

    def _launch(self, *args: Any, **named: Any) -> None:
        parameters = inspect.signature(self.kernel.fn).parameters
        given = dict(zip(parameters, args, strict=False)) | named
        tensors = {name: value for name, value in given.items() if isinstance(value, torch.Tensor)}
        for name, value in tensors.items():
            assert value.device == CUDA, f"{self.name}: {name} lies on {value.device}"
        constants = {name: value for name, value in given.items() if _is_constant(parameters.get(name), value)}
        numbers = given.keys() - constants.keys() - tensors.keys() - _free(self.kernel.fn)
        kinds = {
            name: (given[name] == 1, given[name] % _ALIKE == 0) for name in numbers if isinstance(given[name], int)
        }
        types = {name: value.dtype for name, value in tensors.items()}
        self.compiled.add(tuple(sorted((constants | kinds | types).items(), key=lambda item: item[0])))


@cache
def _free(kernel: Callable[..., None]) -> set[str]:
    """The numbers for which it is not compiled anew. The interpreter, for which kernels are made here, forgets them."""
    found = re.search(r"do_not_specialize=(\[.*?\])", inspect.getsource(kernel))
    return set(ast.literal_eval(found[1])) if found else set()


def _is_constant(parameter: inspect.Parameter | None, value: Any) -> bool:
    return parameter is None or "constexpr" in str(parameter.annotation) or value is None


@contextmanager
def launches() -> Iterator[dict[str, Launches]]:
    """All kernels replaced within, by name."""
    found = {name: Launches(name, getattr(module, name)) for module, name in KERNELS}
    with pytest.MonkeyPatch.context() as patch:
        for module, name in KERNELS:
            patch.setattr(module, name, found[name])
        yield found


#: What sets the device before it dispatches, by what only dispatches.
_DISPATCHED = {torch.Tensor.copy_: torch.ops.aten.copy_, torch.Tensor.__invert__: torch.ops.aten.bitwise_not}


class _Bindings(TorchFunctionMode):
    """What a build of torch without CUDA cannot do with such tensors before anything is dispatched."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.__getitem__ and args[0].device.type == "cuda":
            return _indexed(*args)
        if func in _DISPATCHED:
            return _DISPATCHED[func](*args)
        if func is torch.Tensor.pin_memory:
            return args[0]
        named = kwargs or {}
        if func is torch.tensor and torch.device(named.get("device") or "cpu").type == "cuda":
            return self.__torch_function__(torch.Tensor.to, (), (torch.tensor(*args, dtype=named.get("dtype")), CUDA))
        if func is torch.Tensor.to and isinstance(args[0], FakeTensor):
            args[0].constant = None  # a single number, which is known, would be copied for good
        return func(*args, **named)


def _indexed(x: torch.Tensor, index: Any) -> torch.Tensor:
    """x[index], for integers, slices, None, … and tensors."""
    parts = list(index) if isinstance(index, tuple) else [index]
    if Ellipsis in [part for part in parts if not isinstance(part, torch.Tensor)]:
        at = next(i for i, part in enumerate(parts) if part is Ellipsis)
        taken = sum(part is not None for part in parts) - 1
        parts[at : at + 1] = [slice(None)] * (x.ndim - taken)
    dim, by = 0, []
    for part in parts:
        if part is None:
            x = x.unsqueeze(dim)
        elif isinstance(part, int):
            x = x.select(dim, part)
            continue
        elif isinstance(part, slice):
            x = torch.ops.aten.slice(x, dim, part.start, part.stop, part.step or 1)
        by.append(part if isinstance(part, torch.Tensor) else None)
        dim += 1
    return torch.ops.aten.index(x, by) if any(each is not None for each in by) else x


class Enqueued(TorchDispatchMode):
    """Within, nothing is copied between host and device: such a copy from pageable memory waits, as no capture may.

    Not in inference mode, which would hide what an operation is made of.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        copies = "copy" in func.name()
        sources = [x for x in args if isinstance(x, torch.Tensor)]
        if copies and isinstance(out, torch.Tensor) and any(x.device.type != out.device.type for x in sources):
            raise AssertionError(f"{func} from {[x.device for x in sources]} to {out.device}")
        return out


@contextmanager
def fake_gpu() -> Iterator[None]:
    """Within, tensors are made without numbers."""
    with FakeTensorMode(allow_non_fake_inputs=True), _Bindings():
        yield


def moved(raw: Prepared, config: GpuConfig) -> GpuModel:
    """The model of a network whose layers were replaced on the host, on the fake device."""
    to_device(raw.net)
    return GpuModel(raw.net, raw.geometry, raw.layers, raw.context_len, config)


def to_device(net: nn.Module) -> None:
    """As `net.to` would do it: parameters and buffers go there, and what our own layers made of them.

    What else a module keeps stays on the host.
    """
    for module in net.modules():
        kinds: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
        for kept in kinds:
            kept.update({name: _there(x) for name, x in kept.items() if x is not None})
        for value in list(vars(module).values()):
            _move_captured(value)
        if isinstance(module, Norm):
            module.weight = _there(module.weight)


def _there(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=CUDA)


def _move_captured(value: Any) -> None:
    """The weights that a kernel made by `Linears` holds, by itself or in a group."""
    kernel = getattr(value, "_kernel", value)
    for cell in getattr(kernel, "__closure__", None) or ():
        if isinstance(cell.cell_contents, torch.Tensor) and not isinstance(kernel, nn.Module):
            cell.cell_contents = _there(cell.cell_contents)


class Rows:
    """Stands where the decoder's buffers stand, which are filled from the host."""

    def __init__(self, max_rows: int, max_blocks: int, vocab: int, device: torch.device, *, logits: bool) -> None:
        assert logits
        self.max_rows = max_rows
        kinds = {"top_k": torch.int32, "lengths": torch.int32, "temperature": torch.float32, "min_p": torch.float32}
        kinds |= {"top_p": torch.float64, "point": torch.float64}
        names = ("ids", "positions", "slots", *kinds, "tokens")
        self._all = {name: torch.zeros(max_rows, dtype=kinds.get(name, torch.int64), device=device) for name in names}
        self._all["tables"] = torch.zeros(max_rows, max_blocks, dtype=torch.int32, device=device)
        self._all["logits"] = torch.zeros(max_rows, vocab, device=device)

    def first(self, rows: int) -> DecodeRows:
        return DecodeRows(**{name: x[:rows] for name, x in self._all.items()})

    def clear(self) -> None:
        pass


class Capture:
    """Runs what is to be captured, once it has been run as a warm-up, under the rules of a capture."""

    def capture(self, rows: int, run: Callable[[], None]) -> Callable[[], None]:
        run()
        with Enqueued():
            run()
        return run


def with_decoder(model: GpuModel, max_rows: int, patch: pytest.MonkeyPatch) -> None:
    """Capture the model's decode steps."""
    patch.setattr(decoders, "DecodeBuffers", Rows)
    store = model.store(64, 16)
    model._decoder = decoders.Decoder(model, store, max_rows, Capture())
