"""A causal language model of transformers' classes, made to serve: packed rows, our attention, prepacked weights."""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from . import numerics
from .attention import Batch, Span
from .backend import Layer, serving
from .blocks import BlockPool
from .config import POSITION_BLOCK
from .contiguous import ContiguousKv
from .flag import Flag
from .fused import Fused
from .geometry import Geometry
from .kv import KvStore
from .masks import MaskCache
from .native.lib import Kernels
from .sampler import Draw, Floats, sample

#: Entries of a model's configuration that say nothing about its keys and values.
_PASSING = ("_name_or_path", "transformers_version", "architectures", "dtype", "torch_dtype", "use_cache")


@dataclass(frozen=True, slots=True)
class Computed:
    """What a step gave: a token for each draw, and logits [vocabulary] of the rows that were asked for, by row."""

    tokens: list[int]
    logits: Mapping[int, Floats]


class Model:
    """The network and what the rest of the engine must know of it. `loading.load` makes it.

    Not thread-safe: one thread steps.
    """

    def __init__(
        self,
        net: Any,
        geometry: Geometry,
        layers: Sequence[Layer],
        context_len: int,
        threads: int,
        kernels: Kernels | None = None,
        fused: Fused | None = None,
    ) -> None:
        config = net.config.get_text_config(decoder=True)
        self.net = net
        self.geometry = geometry
        self.layers = tuple(layers)
        self.context_len = context_len
        self.threads = threads
        self.vocab_size: int = config.vocab_size
        self.eos_ids = _eos_ids(net.generation_config, config)
        #: Whether a row's bits were seen not to depend on its neighbours on this machine; see `selftest.py`.
        self.exact = False
        self.exactness = "not tested"
        self._config: dict[str, Any] = json.loads(config.to_json_string(use_diff=False))
        self._masks = MaskCache()
        self.kernels, self._fused = kernels, fused
        self._keeps = "logits_to_keep" in inspect.signature(net.forward).parameters

    def store(self, blocks: int, block_size: int) -> KvStore:
        """An empty store of a pool of its own, of the kind that is decoded from."""
        return ContiguousKv(self.geometry, BlockPool(blocks), block_size)

    def batch(self, store: KvStore, spans: Sequence[Span]) -> Batch:
        return Batch(store, spans, self._masks, self.kernels)

    @torch.inference_mode()
    def forward(
        self,
        store: KvStore,
        spans: Sequence[Span],
        ids: Sequence[int],
        wanted: Sequence[int],
        abandon: Flag | None = None,
    ) -> torch.Tensor:
        """Compute `ids`, the tokens of `spans` in their order, and give the logits of the rows in `wanted`.

        Spans of one row come first. Keys and values go to `store`. Result: [len(wanted), vocabulary], float32.
        `abandon` is looked at before each layer: once it is set, Abandoned is raised, and what was written of these
        positions is to be written again.
        """
        positions = [position for span in spans for position in range(span.start, span.start + span.length)]
        if self._fused is not None:
            return self._fused.forward(store, spans, ids, positions, wanted, abandon)
        batch = self.batch(store, spans)
        if len(positions) == 1:  # no kernel ever sees a single row: those may add in another order
            ids, positions = [*ids, *ids], positions * 2
        inputs: dict[str, Any] = {
            "input_ids": torch.tensor(ids).unsqueeze(0),
            "position_ids": torch.tensor(positions).unsqueeze(0),
            "use_cache": False,
        }
        with serving(batch, abandon):
            return self._logits(inputs, wanted)

    def step(
        self,
        store: KvStore,
        spans: Sequence[Span],
        ids: Sequence[int],
        draws: Sequence[tuple[int, Draw]],
        reported: Sequence[int],
        abandon: Flag | None = None,
    ) -> Computed:
        """As `forward`, and draw: `draws` are rows with what is to be drawn of each.

        The logits of the rows in `reported` are given back.
        """
        rows = list(dict.fromkeys([*(row for row, _ in draws), *reported]))
        logits = self.forward(store, spans, ids, rows, abandon)
        tokens = sample(logits[: len(draws)], [draw for _, draw in draws], self.kernels)
        return Computed(tokens, dict(zip(rows, logits.numpy(), strict=True)))

    def _logits(self, inputs: dict[str, Any], wanted: Sequence[int]) -> torch.Tensor:
        if not wanted:
            self.net.base_model(**inputs)
            return torch.empty(0, self.vocab_size)
        keep = torch.tensor(wanted if len(wanted) > 1 else [*wanted, *wanted])
        if self._keeps:
            logits = self.net(**inputs, logits_to_keep=keep).logits[0]
        else:
            logits = self.net(**inputs).logits[0, keep]
        rows: torch.Tensor = logits[: len(wanted)].float()
        return rows

    def layout_hash(self, block_size: int) -> str:
        """Equal where KV blocks mean the same: model configuration, RoPE, dtype, block size and shape."""
        facts = {name: value for name, value in self._config.items() if name not in _PASSING}
        facts |= {"kv": list(self.geometry.block_shape(block_size)), "kv_dtype": str(self.geometry.dtype)}
        if _scales_rope_by_length(self._config):
            facts["rope_length"] = self.context_len
        return numerics.digest(facts)

    def numerics_hash(self) -> str:
        """Equal where results are promised to be equal bit for bit (if `exact`)."""
        return numerics.digest(
            numerics.machine_facts()
            | {
                "threads": None if self._fused is not None else self.threads,  # whose bits no thread changes
                "kernels": "torch" if self.kernels is None else self.kernels.name,
                "dtype": str(self.geometry.dtype),
                "eight": self.kernels is not None and self.kernels.eight,
                "native": numerics.native_bfloat16_matmul(),
                "position_block": POSITION_BLOCK,
                "exact": self.exact,
            }
        )

    @property
    def how(self) -> str:
        """What computes it, in a few words."""
        if self.kernels is None:
            return "torch"
        parts = ("native kernels", "" if self._fused is None else "fused layers", "w8a8" * self.kernels.eight)
        return ", ".join(filter(None, parts))

    def __repr__(self) -> str:
        shape = f"{self.geometry.layers} layers, {self.geometry.kv_heads}×{self.geometry.head_dim} KV"
        facts = (shape, str(self.geometry.dtype), f"{self.context_len} positions")
        return f"<Model {type(self.net).__name__}: {', '.join(facts)}>"


def _eos_ids(*configs: Any) -> frozenset[int]:
    ids: set[int] = set()
    for config in configs:
        value = getattr(config, "eos_token_id", None)
        ids |= {value} if isinstance(value, int) else set(value or ())
    return frozenset(ids)


def rope_types(config: dict[str, Any]) -> set[str]:
    """The RoPE variants a configuration names, over all its layer types."""
    parameters = config.get("rope_parameters") or config.get("rope_scaling") or {}
    parts = [parameters, *(part for part in parameters.values() if isinstance(part, dict))]
    return {part["rope_type"] for part in parts if "rope_type" in part}


def _scales_rope_by_length(config: dict[str, Any]) -> bool:
    return any("dynamic" in name or name == "longrope" for name in rope_types(config))


def is_gguf(path: Path) -> bool:
    return path.suffix == ".gguf"
