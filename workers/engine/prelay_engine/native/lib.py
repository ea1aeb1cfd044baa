"""The compiled kernels as Python calls them. Shapes here are those of kernels.cpp."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import POINTER, Structure, c_double, c_float, c_int64, c_void_p
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from ..errors import Abandoned
from ..flag import Flag
from .arena import Arena

#: Nanoseconds that a thread without work looks for some before it sleeps. On cores that are shared, longer costs others
#: more than it gains here: with 100 µs, 8 and 32 streams had 15 and 18 % fewer tokens a second on two cores.
_SPIN_NS = 5_000
_CODES = {torch.float32: 0, torch.bfloat16: 1}

Floats = npt.NDArray[np.float32]
Words = npt.NDArray[np.int64]


class LayerArgs(Structure):
    """Addresses of one layer's weights; 0 for what it lacks."""

    _fields_ = (
        *((name, c_void_p) for name in ("qkv", "out", "gate", "up", "down", "qkv_bias", "out_bias")),
        *((name, c_void_p) for name in ("first_norm", "second_norm", "query_norm", "key_norm")),
        ("window", c_int64),
    )


class NetArgs(Structure):
    """A whole decoder."""

    _fields_ = (
        *((name, c_int64) for name in ("layers", "hidden", "heads", "kv_heads", "dim", "inner", "vocabulary")),
        ("layer", POINTER(LayerArgs)),
        *((name, c_void_p) for name in ("embedding", "head", "last_norm")),
        *((name, c_float) for name in ("norm_eps", "scale")),
        *((name, c_int64) for name in ("gelu", "eight")),
    )


class _Inputs(Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("query", "key", "value")),
        *((f"{name}_{what}", c_int64) for name in ("query", "key", "value") for what in ("row", "head")),
    )


class DrawArgs(Structure):
    """What is to be drawn from the row of float32 logits at `row`; see `sampler.py`."""

    _fields_ = (
        ("row", c_void_p), ("point", c_double), ("top_p", c_double), ("top_k", c_int64), ("temperature", c_float),
        ("min_p", c_float),
    )  # fmt: skip


class _Form(Structure):
    _fields_ = (("scale", c_float), ("cap", c_float), ("window", c_int64), ("sinks", c_void_p))


@dataclass(frozen=True, slots=True)
class Place:
    """Where one sequence's keys and values lie: addresses of its blocks in order, and bytes between neighbours."""

    blocks: Words
    layer: int
    kind: int  # from keys to values
    head: int
    slot: int
    block: int  # positions a block


@dataclass(frozen=True, slots=True)
class Packed:
    """A weight [n, k] in panels at `address`; `dtype` is what it was, and what its products are."""

    address: int
    n: int
    k: int
    dtype: torch.dtype
    eight: bool = False  # kept in eight bits


class Spans:
    """The spans of one step as the kernels take them."""

    __slots__ = ("_keep", "address", "count")

    def __init__(self, spans: Sequence[tuple[int, int, Place]]) -> None:
        """Each is (start, length, place); rows follow one another."""
        table, row = [], 0
        for start, length, place in spans:
            where = (place.layer, place.kind, place.head, place.slot, place.block)
            table.append((start, length, row, place.blocks.ctypes.data, *where))
            row += length
        words = np.array(table, dtype=np.int64)
        self._keep = (words, [place for *_, place in spans])
        self.address, self.count = words.ctypes.data, len(table)


class Kernels:
    """One library with a pool of threads. Calls are for one thread at a time; they do not hold the interpreter."""

    dtypes = frozenset(_CODES)

    def __init__(self, path: Path, threads: int, eight: bool = False) -> None:
        """`eight`: weights are kept, and multiplied, in eight bits. Raise OSError if it cannot be loaded."""
        lib = ctypes.CDLL(str(path))
        lib.prelay_pool.restype = c_void_p
        lib.prelay_packed_bytes.restype = c_int64
        lib.prelay_pool.argtypes = (c_int64, c_int64)
        lib.prelay_free_pool.argtypes = (c_void_p,)
        lib.prelay_packed_bytes.argtypes = (c_int64, c_int64, c_int64, c_int64)
        lib.prelay_pack.argtypes = (c_int64, c_int64, c_void_p, c_int64, c_int64, c_void_p)
        lib.prelay_linear.argtypes = (
            c_void_p, c_int64, c_int64, c_void_p, c_int64, c_void_p, c_int64, c_int64, c_void_p, c_void_p,
        )  # fmt: skip
        lib.prelay_attend.argtypes = (
            c_void_p, c_int64, c_void_p, c_int64, c_int64, POINTER(_Inputs), c_int64, c_int64, c_int64, POINTER(_Form),
            c_void_p,
        )  # fmt: skip
        lib.prelay_choose.argtypes = (c_void_p, POINTER(DrawArgs), c_int64, c_int64, c_void_p)
        lib.prelay_describe.argtypes = (
            c_void_p, c_int64, c_int64, c_int64, POINTER(c_double), POINTER(c_int64), c_void_p, c_void_p,
        )  # fmt: skip
        lib.prelay_step.argtypes = (
            c_void_p, c_int64, POINTER(NetArgs), c_void_p, c_int64, c_void_p, c_int64, c_void_p, c_void_p, c_void_p,
            c_int64, c_void_p, c_void_p,
        )  # fmt: skip
        lib.prelay_step.restype = c_int64
        self._lib: Any = lib
        self._pool = lib.prelay_pool(threads, _SPIN_NS)
        self._arena = Arena()
        self.eight = eight
        #: Tells kernels of other sources, compilers and CPUs apart.
        self.name = path.stem

    def __del__(self) -> None:
        if (pool := getattr(self, "_pool", None)) is not None:
            self._lib.prelay_free_pool(pool)

    def pack(self, weight: torch.Tensor, whole: bool = False) -> Packed:
        """Copy `weight` [out, in] into panels that live as long as this object; `whole`: never in eight bits."""
        weight = weight.detach().contiguous()
        code, (n, k), eight = _CODES[weight.dtype], weight.shape, self.eight and not whole
        address = self._arena.take(self._lib.prelay_packed_bytes(code, eight, n, k))
        self._lib.prelay_pack(code, eight, weight.data_ptr(), n, k, address)
        return Packed(address, n, k, weight.dtype, eight)

    def linear(self, x: torch.Tensor, weight: Packed, bias: torch.Tensor | None) -> torch.Tensor:
        """x [..., in] → [..., out] in the weight's dtype; `bias` [out] in float32."""
        x = x.to(weight.dtype).contiguous()
        out = torch.empty(*x.shape[:-1], weight.n, dtype=weight.dtype)
        rows = x.numel() // weight.k
        self._lib.prelay_linear(
            self._pool, _CODES[weight.dtype], weight.eight, x.data_ptr(), rows, weight.address, weight.n, weight.k,
            _address(bias), out.data_ptr(),
        )  # fmt: skip
        return out

    def attend(
        self,
        spans: Spans,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        scale: float,
        window: int | None,
        softcap: float | None,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        """Store keys and values of `spans` and attend to all that stands there; the result is [rows, head, dim].

        `query` [head, rows, dim], `key` and `value` [kv_head, rows, dim]; the last dimension
        of each is contiguous. `sinks` [head], float32. Rows that no span names come back as zeros.
        """
        heads, rows, dim = query.shape
        out = torch.zeros(rows, heads, dim, dtype=query.dtype)
        strides = [stride for x in (query, key, value) for stride in (x.stride(1), x.stride(0))]
        inputs = _Inputs(query.data_ptr(), key.data_ptr(), value.data_ptr(), *strides)
        form = _Form(scale, softcap or 0.0, window or 0, _address(sinks))
        self._lib.prelay_attend(
            self._pool, _CODES[query.dtype], spans.address, spans.count, layer, inputs, heads, key.shape[0], dim, form,
            out.data_ptr(),
        )  # fmt: skip
        return out

    def choose(self, draws: Sequence[DrawArgs], vocabulary: int) -> list[int]:
        """A token for each draw; -1 where the row holds a NaN or no finite peak."""
        tokens = np.empty(len(draws), dtype=np.int64)
        args = (DrawArgs * len(draws))(*draws)
        self._lib.prelay_choose(self._pool, args, len(draws), vocabulary, tokens.ctypes.data)
        found: list[int] = tokens.tolist()
        return found

    def describe(self, row: Floats, token: int, count: int) -> tuple[float, int, list[int], list[float]]:
        """Of a row of logits [vocabulary]: log p(token), its rank, and the `count` likeliest ids with theirs.

        Of equals the lower id ranks first.
        """
        count = min(count, len(row))
        own, rank = c_double(), c_int64()
        ids, logs = np.empty(count, dtype=np.int64), np.empty(count)
        self._lib.prelay_describe(row.ctypes.data, len(row), token, count, own, rank, ids.ctypes.data, logs.ctypes.data)
        return own.value, rank.value, ids.tolist(), logs.tolist()

    def step(
        self,
        net: NetArgs,
        dtype: torch.dtype,
        spans: Spans,
        ids: Sequence[int],
        cosines: torch.Tensor,
        sines: torch.Tensor,
        wanted: Sequence[int],
        abandon: Flag | None = None,
    ) -> torch.Tensor:
        """Run the rows of `spans` through `net`, and give the logits of `wanted`: [len(wanted), vocabulary], float32.

        `cosines` and `sines` are [rows, dim], contiguous float32. Raise Abandoned when `abandon` is set between layers.
        """
        logits = torch.empty(len(wanted), net.vocabulary)
        words, rows = np.array(ids, dtype=np.int64), np.array(wanted, dtype=np.int64)
        left = self._lib.prelay_step(
            self._pool, _CODES[dtype], net, spans.address, spans.count, words.ctypes.data, len(ids),
            cosines.data_ptr(), sines.data_ptr(), rows.ctypes.data, len(rows), logits.data_ptr(),
            None if abandon is None else abandon.address,
        )  # fmt: skip
        if left:
            raise Abandoned
        return logits


def _address(tensor: torch.Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
