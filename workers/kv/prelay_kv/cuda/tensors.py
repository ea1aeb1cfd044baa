"""Tensors over memory that torch did not allocate."""

from __future__ import annotations

from math import prod

import torch


def wrap(ptr: int, nbytes: int, dtype: torch.dtype, shape: tuple[int, ...], device: str | torch.device) -> torch.Tensor:
    """A contiguous tensor over the `nbytes` at `ptr`, which stay their owner's: it must not be touched after them.

    `device` is where it is used: a peer's memory, mapped for this device, lies on another one. So neither torch nor the
    driver is asked where `ptr` lies, as they would be through `__cuda_array_interface__`, where a device that is not
    the one they find means a copy of all of it.
    """
    if prod(shape) * dtype.itemsize != nbytes:
        raise ValueError(f"{shape} of {dtype} is not {nbytes} bytes")
    place = torch.device(device)
    storage = torch._C._construct_storage_from_data_pointer(ptr, place, nbytes)
    return torch.empty(0, dtype=dtype, device=place).set_(storage, 0, shape)  # type: ignore[call-overload,no-any-return]
