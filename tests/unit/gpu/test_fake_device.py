"""The forward of every family, where no number can be read and host and device are told apart.

On a card each of these would be an error of the first run, or a wait in every step; on the CPU none of them shows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from transformers import masking_utils

from prelay_engine import loading
from prelay_engine.attention import Span
from prelay_engine.backend import run_probe
from prelay_engine.config import EngineConfig, GpuConfig
from prelay_engine.gpu.layers import Linears, replace_layers
from prelay_engine.gpu.model import GpuModel
from prelay_engine.loading import prepare, told
from prelay_engine.memory import Thrift
from prelay_engine.sampler import Draw
from prelay_queue.job import Sampling
from tests.unit.engine.conftest import MakeFolder
from tests.unit.engine.test_families import FAMILIES, QUICK

from .fake_device import CUDA, Enqueued, Launches, fake_gpu, launches, moved, to_device, with_decoder

#: Without those with experts: which rows one has is asked of the device, in each layer.
DENSE = [name for name, (_, changes) in FAMILIES.items() if not any("expert" in key for key in changes)]
FAMILY = [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in DENSE]
SAMPLING = Sampling(max_tokens=4, temperature=0.8, top_p=0.9, top_k=20, seed=1)


def prepared(folder: Any, exact: bool) -> Any:
    """As loading does it, up to the layers that run on the device."""
    config = EngineConfig(model=folder, gpu=GpuConfig(device="cpu", exact=exact))
    with told(folder), torch.no_grad():
        raw = prepare(config, folder, torch.bfloat16, Thrift())
        replace_layers(raw.net, Linears(exact=exact))
    return raw


def step(model: GpuModel, singles: int, *lengths: int) -> torch.Tensor:
    """Enqueue a step of single rows and of chunks; the tokens that it draws."""
    store = model.store(64, 16)
    spans = [Span(f"single {row}", 20, 1) for row in range(singles)]
    spans += [Span(f"chunk {n}", 16, length) for n, length in enumerate(lengths)]
    for span in spans:
        store.open(span.key, span.start + span.length, 500)
    rows = singles + sum(lengths)
    wanted = list(range(rows))[: singles + 1]
    logits = model._enqueue(store, spans, [7] * rows, wanted).float()
    assert logits.device == CUDA
    assert logits.shape == (len(wanted), model.vocab_size)
    return model._draw(logits, [Draw(SAMPLING, 0) for _ in wanted])


def compiled(found: dict[str, Launches]) -> dict[str, set[Any]]:
    return {name: set(each.compiled) for name, each in found.items()}


@pytest.mark.parametrize("exact", [False, True], ids=["fast", "exact"])
@pytest.mark.parametrize("family", FAMILY)
def test_a_step_waits_for_nothing_mixes_no_devices_and_compiles_nothing_anew(
    family: str, exact: bool, tiny_folder: MakeFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind, changes = FAMILIES[family]
    raw = prepared(tiny_folder(kind, **changes), exact)
    with torch.no_grad(), fake_gpu(), launches() as found:
        model = moved(raw, GpuConfig(exact=exact))
        assert model.device == CUDA
        assert model.graphable
        assert step(model, 2, 17).device == CUDA
        step(model, 3)
        before = compiled(found)
        step(model, 7, 31, 2)
        step(model, 1)
        with_decoder(model, 3, monkeypatch)
        assert compiled(found) == before
    for name in ("_attend", "_write_kv", "_sample") if exact else ("_attend", "_decode", "_write_kv", "_sample"):
        assert before[name], f"{name} was never launched"
    assert model._decoder is not None
    assert model._decoder.graphs == "CUDA graphs: 1 to 3 rows captured"


@pytest.mark.parametrize("family", FAMILY)
def test_what_a_network_asks_for_is_seen_on_the_device_as_on_the_host(
    family: str, tiny_folder: MakeFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Of positions that follow one another transformers sees it by their numbers.
    monkeypatch.setattr(masking_utils, "find_packed_sequence_indices", lambda _: None)
    kind, changes = FAMILIES[family]
    folder = tiny_folder(kind, **changes)
    here = prepared(folder, exact=False)
    with told(folder), torch.no_grad():
        net = loading._load_net(folder, torch.bfloat16)
        loading._pin_rope(net, here.context_len)
        with fake_gpu():
            to_device(net)
            probe = run_probe(net)
    probe.check_masks(here.context_len)
    assert [probe.layers[index] for index in range(here.geometry.layers)] == here.layers
    assert probe.logits.shape == here.logits.shape


def test_what_a_card_would_forbid_or_wait_for_is_an_error_here() -> None:
    with torch.no_grad(), fake_gpu():
        here, there = torch.zeros(3), torch.zeros(3, device=CUDA)
        with pytest.raises(DataDependentOutputException):
            there[0].item()
        with pytest.raises(DynamicOutputShapeException):
            torch.ops.aten.nonzero(there)
        with pytest.raises(RuntimeError, match="found at least two devices"):
            here + there
        copies: list[Callable[[], object]] = [
            lambda: here.to(CUDA),
            lambda: there.to("cpu"),
            lambda: there.copy_(here),
            lambda: torch.tensor([1], device=CUDA),
        ]
        for copy in copies:
            with pytest.raises(AssertionError, match="copy"), Enqueued():
                copy()
        with Enqueued():
            assert torch.where(there > 0, there, -1).device == CUDA
