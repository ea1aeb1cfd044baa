"""A model on a GPU: one step's rows go through it in kernels that are enqueued, and the host waits once, at the end."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import transformers
import triton

from .. import numerics
from ..attention import Span
from ..backend import Layer, serving
from ..blocks import BlockPool
from ..config import GpuConfig
from ..errors import ModelError, OutOfMemory
from ..flag import Flag
from ..geometry import Geometry
from ..kv import KvStore, PagedKv
from ..model import Computed, Model
from ..sampler import Draw, sample
from .batch import GpuBatch, Sinks
from .decoder import Decoder
from .draws import Params, is_plain
from .graphs import Capture
from .inputs import Inputs, inputs
from .kernels import sample as sampling
from .kernels.decode import Scratch, scratch
from .kernels.tiles import Shape
from .layers import has_experts
from .memory import is_out_of_memory


class GpuModel(Model):
    """The network on `config.device`, over paged stores on the same; `loading.load_on_gpu` makes it.

    A step is done when `forward` or `step` returns: nothing of it runs on then, so its blocks may be given to others.
    """

    def __init__(
        self, net: Any, geometry: Geometry, layers: Sequence[Layer], context_len: int, config: GpuConfig
    ) -> None:
        super().__init__(net, geometry, layers, context_len, threads=1)
        if len({layer.heads for layer in layers}) != 1:
            raise ModelError("layers with different numbers of heads are not supported on a GPU")
        self.config = config
        self.device: torch.device = net.device
        self._heads = layers[0].heads
        group = self._heads // geometry.kv_heads
        self.tile_rows = (Shape.of(geometry.head_dim, geometry.dtype, group, config.exact).rows(group),)
        self._scratch = scratch(0, self._heads, geometry.head_dim, self.device)
        self.sinks = Sinks()
        #: Some rows go to experts, whose products are torch's own and which the host chooses.
        self.experts = has_experts(net)
        self._decoder: Decoder | None = None

    @property
    def graphable(self) -> bool:
        """Whether a step can be captured: nothing in it is decided on the host."""
        return not self.experts

    def decode_from(self, store: PagedKv, max_rows: int, capture: Capture | None) -> None:
        """From now on steps of single rows of `store` run in static buffers, as graphs where `capture` makes them.

        May raise OutOfMemory.
        """
        with self._working():
            self._decoder = Decoder(self, store, max_rows, capture)

    def store(self, blocks: int, block_size: int) -> PagedKv:
        shape = (blocks, *self.geometry.block_shape(block_size))
        tensor = torch.zeros(shape, dtype=self.geometry.dtype, device=self.device)
        return PagedKv(self.geometry, BlockPool(blocks), block_size, tensor)

    def forward(
        self,
        store: KvStore,
        spans: Sequence[Span],
        ids: Sequence[int],
        wanted: Sequence[int],
        abandon: Flag | None = None,
    ) -> torch.Tensor:
        with self._working():
            return self._enqueue(store, spans, ids, wanted, abandon).float().cpu()

    def step(
        self,
        store: KvStore,
        spans: Sequence[Span],
        ids: Sequence[int],
        draws: Sequence[tuple[int, Draw]],
        reported: Sequence[int],
        abandon: Flag | None = None,
    ) -> Computed:
        rows = list(dict.fromkeys([*(row for row, _ in draws), *reported]))
        with self._working():
            if self._decoder is not None and self._decoder.takes(store, spans, draws):
                logits, tokens = self._decoder.compute(spans, ids, [draw for _, draw in draws])
                return self._computed(logits, tokens, rows, draws, reported)
            logits = self._enqueue(store, spans, ids, rows, abandon).float()
            tokens = self._draw(logits[: len(draws)], [draw for _, draw in draws])
            return self._computed(logits, tokens, rows, draws, reported)

    @contextmanager
    def _working(self) -> Iterator[None]:
        """On this device, and done at the end whatever happens; where memory runs out, raise OutOfMemory."""
        why = None
        with torch.inference_mode(), self._current():
            try:
                yield
            except RuntimeError as error:
                if not is_out_of_memory(error):
                    raise
                why = str(error).partition("\n")[0]
            finally:
                self.synchronize()
        if why is not None:  # out here, where the error no longer keeps alive what its frames hold on the device
            raise OutOfMemory(why)

    @contextmanager
    def _current(self) -> Iterator[None]:
        if self.device.type == "cuda":
            with torch.cuda.device(self.device):
                yield
        else:
            yield

    def synchronize(self) -> None:
        """Wait for all that this thread has enqueued."""
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()

    def _enqueue(
        self,
        store: KvStore,
        spans: Sequence[Span],
        ids: Sequence[int],
        wanted: Sequence[int],
        abandon: Flag | None = None,
    ) -> torch.Tensor:
        """The logits of the rows in `wanted`, on the device and not yet there."""
        assert isinstance(store, PagedKv)
        blocks = [store.pool.blocks(span.key) for span in spans]
        split = not self.config.exact
        given = inputs(spans, ids, blocks, store.block_size, self.tile_rows, split=split).to(self.device)
        batch = GpuBatch(store.tensor, given, self.room(given.singles), self.sinks, exact=self.config.exact)
        with serving(batch, abandon):
            return self._run(given, torch.tensor(wanted, dtype=torch.int64, device=self.device))

    def _run(self, given: Inputs, wanted: torch.Tensor) -> torch.Tensor:
        """[len(wanted), vocabulary] in the dtype of the network."""
        named = {"input_ids": given.ids[None], "position_ids": given.positions[None], "use_cache": False}
        if not len(wanted):
            self.net.base_model(**named)
            return torch.empty(0, self.vocab_size, device=self.device)
        if self._keeps:
            logits: torch.Tensor = self.net(**named, logits_to_keep=wanted).logits[0]
            return logits
        whole: torch.Tensor = self.net(**named).logits[0]
        return whole[wanted]

    def room(self, rows: int) -> Scratch:
        """What `rows` single rows are decoded in, at least."""
        if self._scratch.sums.shape[0] < rows:
            self._scratch = scratch(rows, self._heads, self.geometry.head_dim, self.device)
        return self._scratch

    def _draw(self, logits: torch.Tensor, draws: Sequence[Draw]) -> torch.Tensor:
        """A token for each row of logits [row, vocabulary], on the device.

        Of draws that are not plain it says nothing.
        """
        tokens = torch.empty(len(draws), dtype=torch.int64, device=self.device)
        heat, top_k, top_p, min_p, point = (torch.from_numpy(each).to(self.device) for each in Params.of(draws))
        sampling.sample(logits, heat, top_k, top_p, min_p, point, tokens)
        return tokens

    def _computed(
        self,
        logits: torch.Tensor,
        tokens: torch.Tensor,
        rows: Sequence[int],
        draws: Sequence[tuple[int, Draw]],
        reported: Sequence[int],
    ) -> Computed:
        """Fetch what is asked for: all tokens, and the logits [row, vocabulary] that somebody wants to see."""
        shaped = [number for number, (_, draw) in enumerate(draws) if not is_plain(draw)]
        places = {row: place for place, row in enumerate(rows)}
        fetched = list(dict.fromkeys([*shaped, *(places[row] for row in reported)]))
        if fetched:
            there = logits[torch.tensor(fetched, device=self.device)].cpu()
            found = dict(zip(fetched, there.unbind(0), strict=True))
        chosen: list[int] = tokens.tolist()
        for number in shaped:
            chosen[number] = sample(found[number][None], [draws[number][1]])[0]
        return Computed(chosen, {row: found[places[row]].numpy() for row in reported})

    def numerics_hash(self) -> str:
        """Equal where results are promised to be equal bit for bit (if `exact`)."""
        return numerics.digest(self._facts() | {"dtype": str(self.geometry.dtype), "exact": self.exact})

    def _facts(self) -> dict[str, Any]:
        versions = {"torch": torch.__version__, "triton": triton.__version__, "transformers": transformers.__version__}
        if self.device.type != "cuda":
            return versions | numerics.machine_facts()
        card = torch.cuda.get_device_properties(self.device)
        return versions | {
            "card": card.name,
            "capability": (card.major, card.minor),
            "multiprocessors": card.multi_processor_count,
            "cuda": torch.version.cuda,
            "exact mode": self.config.exact,
        }

    @property
    def how(self) -> str:
        parts = (f"Triton attention on {self.device}", "exact products" if self.config.exact else "cuBLAS")
        graphs = None if self._decoder is None else self._decoder.graphs
        return ", ".join((*parts, graphs or "no CUDA graphs"))
