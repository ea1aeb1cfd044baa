"""The model on a GPU computes what the model on a CPU does, and in exact mode the same bits whatever runs beside it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from prelay_engine.attention import Span
from prelay_engine.config import EngineConfig, GpuConfig
from prelay_engine.engine import Engine
from prelay_engine.errors import ConfigError, ModelError, OutOfMemory
from prelay_engine.gpu.loading import load_on_gpu
from prelay_engine.gpu.model import GpuModel
from prelay_engine.kv import KvStore
from prelay_engine.model import Model
from prelay_engine.sampler import Draw
from prelay_engine.sequence import Sequence as Job
from prelay_queue.job import Sampling

from .conftest import LoadCpu, LoadGpu

pytestmark = pytest.mark.timeout(240)

#: All but the first take too long for every run: the interpreter is slow.
KINDS = ["llama", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("qwen3", "gemma2", "gpt_oss", "phi3"))]
BLOCK = 16
IDS = [(7 * i + 3) % 320 for i in range(40)]
GREEDY = Sampling(max_tokens=8, temperature=0, ignore_eos=True)


def logits(model: Model, store: KvStore, *cuts: int, key: str = "a") -> torch.Tensor:
    """Of IDS, [position, vocabulary], computed in pieces that end at `cuts`."""
    store.open(key, len(IDS), len(IDS))
    begin, found = 0, []
    for cut in (*cuts, len(IDS)):
        rows = list(range(cut - begin))
        found.append(model.forward(store, [Span(key, begin, cut - begin)], IDS[begin:cut], rows))
        begin = cut
    return torch.cat(found)


class Graphs:
    """Captures by keeping the call."""

    def __init__(self) -> None:
        self.captured: list[int] = []

    def capture(self, rows: int, run: Callable[[], None]) -> Callable[[], None]:
        run()
        self.captured.append(rows)
        return run


@pytest.mark.parametrize("kind", KINDS)
def test_logits_are_those_of_the_cpu_in_chunks_and_row_by_row(kind: str, on_gpu: LoadGpu, on_cpu: LoadCpu) -> None:
    here = on_cpu(kind)
    wanted = logits(here, here.store(8, BLOCK))
    there = on_gpu(kind, False)
    found = logits(there, there.store(8, BLOCK), 17, 18, 37, 38, 39)
    assert torch.allclose(found, wanted, atol=2e-4 * float(wanted.std()), rtol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["llama", "gemma2"])
def test_in_exact_mode_no_bit_depends_on_cuts_neighbours_or_static_buffers(kind: str, on_gpu: LoadGpu) -> None:
    model = on_gpu(kind)
    assert model.exact, model.exactness
    whole = logits(model, model.store(8, BLOCK))
    assert torch.equal(whole, logits(model, model.store(8, BLOCK), 1, 18, 33, 34))

    store = model.store(16, BLOCK)
    model.decode_from(store, 4, Graphs())
    for key, length in (("a", 36), ("b", 30), ("c", 7)):
        store.open(key, len(IDS), len(IDS))
        model.forward(store, [Span(key, 0, length)], IDS[:length], [])
    draw = Draw(GREEDY, 0)
    for step in range(3):
        spans = [Span("c", 7 + step, 1), Span("a", 36 + step, 1), Span("b", 30 + step, 1)]
        ids = [IDS[span.start] for span in spans]
        found = model.step(store, spans, ids, [(row, draw) for row in range(3)], [0, 1, 2])
        for row, span in enumerate(spans):
            assert torch.equal(torch.from_numpy(found.logits[row]), whole[span.start])
            assert found.tokens[row] == int(whole[span.start].argmax())


def test_a_prompt_beside_decoding_rows_is_computed_in_one_step(on_gpu: LoadGpu) -> None:
    model = on_gpu("llama", False)
    whole = logits(model, model.store(8, BLOCK))
    store = model.store(16, BLOCK)
    for key, length in (("a", 20), ("b", 11)):
        store.open(key, len(IDS), len(IDS))
        model.forward(store, [Span(key, 0, length)], IDS[:length], [])
    spans = [Span("b", 11, 1), Span("a", 20, 15)]
    found = model.forward(store, spans, [IDS[11], *IDS[20:35]], [0, 1, 15])
    assert torch.allclose(found, whole[[11, 20, 34]], atol=1e-3)


def answers(model: Model, store: KvStore, jobs: Sequence[Sampling]) -> list[tuple[list[int], list[object]]]:
    """Of prompts of several lengths: ids, and what was said of each."""
    config = EngineConfig(model=Path("any"), num_blocks=store.pool.size, max_running=4, prefill_chunk=20)
    engine = Engine(model, store, config)
    sequences = [
        Job(key=str(i), prompt_ids=tuple(IDS[i : 12 + 7 * i]), sampling=sampling) for i, sampling in enumerate(jobs)
    ]
    for sequence in sequences:
        engine.add(sequence)
    notes: dict[str, list[object]] = {sequence.key: [] for sequence in sequences}
    while engine.has_work:
        for new in engine.step().tokens:
            notes[new.key].append(new.note)
    store.pool.check()
    assert store.pool.available == store.pool.size
    return [(sequence.ids, notes[sequence.key]) for sequence in sequences]


SETTINGS = {
    "greedy": GREEDY,
    "seeded": replace(GREEDY, temperature=0.8, top_p=0.9, seed=5),
    "penalties": replace(GREEDY, temperature=0.7, seed=2, repetition_penalty=1.3, presence_penalty=0.5),
    "logprobs": replace(GREEDY, logprobs=3),
    "prompt logprobs": replace(GREEDY, prompt_logprobs=1),
}


@pytest.mark.slow
@pytest.mark.parametrize("captured", [True, False], ids=["in static buffers", "eager"])
def test_answers_are_those_of_the_cpu_whatever_they_ask_for(captured: bool, on_gpu: LoadGpu, on_cpu: LoadCpu) -> None:
    jobs = [SETTINGS[name] for name in ("greedy", "seeded", "penalties", "logprobs")]
    here, there = on_cpu("llama"), on_gpu("llama", False)
    store = there.store(32, BLOCK)
    if captured:
        there.decode_from(store, 4, Graphs())
    found = answers(there, store, jobs)
    wanted = answers(here, here.store(32, BLOCK), jobs)
    assert [ids for ids, _ in found] == [ids for ids, _ in wanted]
    for ours, theirs in zip(found[3][1], wanted[3][1], strict=True):
        assert ours.logprobs.logprob == pytest.approx(theirs.logprobs.logprob, abs=1e-4)  # type: ignore[attr-defined]
    (ours,) = answers(there, there.store(32, BLOCK), [SETTINGS["prompt logprobs"]])
    (theirs,) = answers(here, here.store(32, BLOCK), [SETTINGS["prompt logprobs"]])
    assert ours[0] == theirs[0]
    assert len(ours[1][0].prompt) == len(theirs[1][0].prompt) > 0  # type: ignore[attr-defined]


def test_graphs_are_captured_for_each_size_and_what_does_not_fit_into_one_runs_without(on_gpu: LoadGpu) -> None:
    model, graphs = on_gpu("llama", False), Graphs()
    store = model.store(16, BLOCK)
    model.decode_from(store, 2, graphs)
    assert graphs.captured == [2, 1]
    assert "CUDA graphs: 1 to 2 rows captured" in model.how
    decoder = model._decoder
    assert decoder is not None
    single = [Span(key, 0, 1) for key in "abc"]
    draws = [(row, Draw(GREEDY, 0)) for row in range(3)]
    assert decoder.takes(store, single[:2], draws[:2])
    assert not decoder.takes(store, single, draws), "more rows than there are buffers"
    assert not decoder.takes(store, single[:2], draws[:1]), "a row from which nothing is drawn"
    assert not decoder.takes(store, [single[0], Span("b", 0, 2)], [(0, draws[0][1]), (2, draws[0][1])])
    assert not decoder.takes(model.store(16, BLOCK), single[:2], draws[:2]), "another store's rows"


@pytest.fixture
def failing(on_gpu: LoadGpu, monkeypatch: pytest.MonkeyPatch) -> GpuModel:
    """A model whose next forward finds no memory."""
    model = on_gpu("llama", False)
    left = [RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB")]
    forward = type(model.net).forward

    def fail_once(*args: object, **kwargs: object) -> object:
        if left:
            raise left.pop()
        return forward(*args, **kwargs)

    monkeypatch.setattr(type(model.net), "forward", fail_once)
    return model


def test_a_step_without_memory_says_so_and_the_next_one_works(failing: GpuModel) -> None:
    store = failing.store(4, BLOCK)
    store.open("a", 8, 8)
    with pytest.raises(OutOfMemory, match=r"Tried to allocate 2\.00 GiB"):
        failing.step(store, [Span("a", 0, 8)], IDS[:8], [(7, Draw(GREEDY, 0))], [])
    assert failing.step(store, [Span("a", 0, 8)], IDS[:8], [(7, Draw(GREEDY, 0))], []).tokens


def test_where_there_is_no_gpu_the_refusal_says_what_torch_sees(tiny_folder: Callable[..., Path]) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is one")
    with pytest.raises(ModelError, match="there is no GPU 3: torch sees 0"):
        load_on_gpu(EngineConfig(model=tiny_folder("llama", num_hidden_layers=2), gpu=GpuConfig(device="cuda:3")))


def test_settings_that_contradict_a_gpu_are_refused_with_their_values() -> None:
    with pytest.raises(ConfigError, match=r"memory_utilization must be above 0 and at most 1, not 1\.2"):
        GpuConfig(memory_utilization=1.2)
    with pytest.raises(ConfigError, match="quantization must be none on a GPU"):
        EngineConfig(model=Path("any"), quantization="w8a8", gpu=GpuConfig())
