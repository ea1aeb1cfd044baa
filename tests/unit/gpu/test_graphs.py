"""Graphs that are only recorded, on buffers in CPU memory; and what the real capture asks of torch, in what order."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from prelay_engine.errors import CaptureError, OutOfMemory
from prelay_engine.gpu.buckets import Buckets
from prelay_engine.gpu.buffers import Array, DecodeBatch, DecodeBuffers, DecodeRows
from prelay_engine.gpu.capture import WARM_UPS, TorchCapture
from prelay_engine.gpu.graphs import GraphRunner

MAX_ROWS, MAX_BLOCKS, VOCAB = 8, 5, 300
CPU = torch.device("cpu")


def batches(max_rows: int = MAX_ROWS) -> st.SearchStrategy[DecodeBatch]:
    return st.lists(
        st.tuples(
            st.integers(0, VOCAB - 1),
            st.integers(0, 5000),
            st.integers(0, 10**6),
            st.lists(st.integers(0, 10**6), min_size=1, max_size=MAX_BLOCKS),
            st.floats(0, 2, width=32),
            st.integers(-1, 2 * VOCAB),
            st.floats(0, 1, width=32),
            st.floats(0, 1, width=32),
            st.floats(0, 1, exclude_max=True),
        ),
        min_size=1,
        max_size=max_rows,
    ).map(lambda rows: DecodeBatch(*zip(*rows, strict=True)))


def buffers(max_rows: int = MAX_ROWS, *, logits: bool = False) -> DecodeBuffers:
    return DecodeBuffers(max_rows, MAX_BLOCKS, VOCAB, CPU, logits=logits)


def state(of: DecodeBuffers) -> dict[str, list[object]]:
    rows = of.first(of.max_rows)
    return {each.name: getattr(rows, each.name).tolist() for each in fields(rows) if each.name != "logits"}


def scribble(rows: DecodeRows) -> None:
    for each in fields(rows):
        tensor = getattr(rows, each.name)
        if tensor is not None:
            tensor.fill_(77)


# Buffers


@given(st.lists(batches(), min_size=1, max_size=5), st.booleans())
def test_after_any_batches_the_buffers_are_as_if_only_the_last_had_ever_been_there(
    sequence: list[DecodeBatch], crash: bool
) -> None:
    used, fresh = buffers(), buffers()
    for batch in sequence:
        if crash:  # a step that went wrong may have written anything anywhere
            scribble(used.first(MAX_ROWS))
        used.fill(batch)
    fresh.fill(sequence[-1])
    assert state(used) == state(fresh)
    used.clear()
    assert state(used) == state(buffers())


@given(batches())
def test_rows_hold_what_the_batch_says_and_padding_stores_nothing_and_has_no_keys(batch: DecodeBatch) -> None:
    rows, into = len(batch.ids), buffers()
    into.fill(batch)
    live, padding = into.first(rows), into.first(MAX_ROWS)
    for name in ("ids", "positions", "slots", "temperature", "top_p", "min_p"):
        assert getattr(live, name).tolist() == list(getattr(batch, name))
    assert live.lengths.tolist() == [position + 1 for position in batch.positions]
    assert live.tables.tolist() == [[*table, *[0] * (MAX_BLOCKS - len(table))] for table in batch.tables]
    assert padding.slots[rows:].tolist() == [-1] * (MAX_ROWS - rows)
    for name in ("ids", "positions", "lengths", "tables", "temperature", "top_k"):
        assert not getattr(padding, name)[rows:].any()
    assert padding.tokens.tolist() == [-1] * MAX_ROWS, "a step that never ran gives nobody a token"


@given(batches())
def test_a_draw_never_falls_on_the_whole_and_no_more_tokens_are_kept_than_there_are(batch: DecodeBatch) -> None:
    into = buffers()
    into.fill(batch)
    assert (into.first(MAX_ROWS).point < 1).all()
    top_k = into.first(len(batch.ids)).top_k.tolist()
    assert top_k == [min(max(0, given), VOCAB) for given in batch.top_k]


def one(position: int = 3, table: Sequence[int] | Array = (7,), point: float = 0.0) -> DecodeBatch:
    return DecodeBatch((1,), (position,), (0,), (table,), (0.0,), (0,), (1.0,), (0.0,), (point,))


def test_a_point_just_below_one_is_not_rounded_to_one() -> None:
    into = buffers()
    into.fill(one(point=1 - 2.0**-53))
    assert into.first(1).point.item() == 1 - 2.0**-53


def test_tables_may_be_arrays() -> None:
    into = buffers()
    into.fill(one(table=np.array([4, 9], dtype=np.int32)))
    assert into.first(2).tables.tolist() == [[4, 9, 0, 0, 0], [0] * 5]


def test_what_is_too_large_or_uneven_is_refused_and_changes_nothing() -> None:
    into = buffers(2)
    into.fill(one())
    before = state(into)
    with pytest.raises(ValueError, match="1 rows of 6 blocks are more than 2 of 5"):
        into.fill(one(table=range(6)))
    with pytest.raises(ValueError, match="3 rows of 1 blocks"):
        into.fill(DecodeBatch([1] * 3, [1] * 3, [1] * 3, [[1]] * 3, *[(0, 0, 0)] * 5))
    with pytest.raises(ValueError, match=r"have \[1, 2\] rows"):
        into.fill(DecodeBatch((1,), (1, 2), (1,), ((1,),), (0,), (0,), (1,), (0,), (0,)))
    assert state(into) == before


def test_addresses_stay_and_are_aligned_and_views_share_them() -> None:
    into = buffers(logits=True)
    names = [each.name for each in fields(DecodeRows)]
    before = {name: getattr(into.first(MAX_ROWS), name).data_ptr() for name in names}
    into.fill(one())
    for rows in (1, MAX_ROWS):
        assert {name: getattr(into.first(rows), name).data_ptr() for name in names} == before
    packed = [before[name] - before["ids"] for name in ("positions", "slots", "lengths", "temperature", "point")]
    assert all(distance % 256 == 0 for distance in packed)
    logits = into.first(3).logits
    assert logits is not None
    assert logits.shape == (3, VOCAB)
    assert buffers().first(3).logits is None
    assert repr(into) == "<DecodeBuffers 1/8 rows, 1/5 blocks, on cpu>"


# Graphs


@dataclass
class Recorder:
    """Runs a capture as the real one does, and records it; captures of the sizes in `fails` raise."""

    fails: dict[int, Exception] = field(default_factory=dict)
    asked: list[int] = field(default_factory=list)
    replayed: list[int] = field(default_factory=list)

    def capture(self, rows: int, run: Callable[[], None]) -> Callable[[], None]:
        self.asked.append(rows)
        run()
        if rows in self.fails:
            raise self.fails[rows]

        def replay() -> None:
            self.replayed.append(rows)
            run()

        return replay


class Network:
    """Writes a token that says what a row read; counts what it stored, by slot."""

    def __init__(self, into: DecodeBuffers) -> None:
        self.buffers = into
        self.stored: set[int] = set()

    def __call__(self, rows: int) -> None:
        live = self.buffers.first(rows)
        live.tokens.copy_(live.ids * 1000 + live.lengths + live.tables.sum(dim=1))
        self.stored |= {slot for slot in live.slots.tolist() if slot >= 0}


def runner(recorder: Recorder, most: int = MAX_ROWS) -> tuple[GraphRunner, Network]:
    network = Network(buffers(most))
    graphs = GraphRunner(Buckets(most), recorder)
    graphs.capture_all(network)
    return graphs, network


@given(st.lists(batches(), min_size=1, max_size=5), st.sampled_from([None, 1, 4, 8]))
def test_replayed_steps_give_what_eager_ones_do(sequence: list[DecodeBatch], failing: int | None) -> None:
    graphs, network = runner(Recorder({failing: OutOfMemory()} if failing else {}))
    for batch in sequence:
        rows = len(batch.ids)
        network.buffers.fill(batch)
        ran = graphs.compute(rows, network)
        assert ran >= rows
        eager = Network(buffers())
        eager.buffers.fill(batch)
        eager(rows)
        assert network.buffers.first(rows).tokens.tolist() == eager.buffers.first(rows).tokens.tolist()
    assert network.stored == {slot for batch in sequence for slot in batch.slots}, "and a capture stores nothing"
    assert graphs.replayed + graphs.eager == len(sequence)


def test_the_largest_is_captured_first_and_a_batch_replays_the_smallest_that_holds_it() -> None:
    recorder = Recorder()
    graphs, network = runner(recorder, 24)
    assert recorder.asked == [24, 16, 8, 4, 2, 1]
    assert [graphs.compute(rows, network) for rows in (1, 3, 9, 17, 24)] == [1, 4, 16, 24, 24]
    assert recorder.replayed == [1, 4, 16, 24, 24]
    assert repr(graphs) == "<GraphRunner 1 to 24 rows captured; 5 replayed, 0 eager>"


def test_where_memory_runs_out_that_bucket_and_the_larger_ones_run_eagerly_and_one_line_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    recorder = Recorder({24: OutOfMemory("none for 24"), 8: OutOfMemory("none for 8")})
    with caplog.at_level(logging.WARNING):
        graphs, network = runner(recorder, 24)
    assert [record.getMessage() for record in caplog.records] == [
        "CUDA graphs: 1 to 4 rows captured, 8 to 24 rows run without (none for 8)"
    ]
    assert [graphs.compute(rows, network) for rows in (4, 5, 17)] == [4, 5, 17]
    assert recorder.replayed == [4]
    assert (graphs.replayed, graphs.eager) == (1, 2)
    assert (graphs.fit(4), graphs.fit(16), graphs.fit(25)) == (4, None, None)


def test_the_larger_graphs_are_let_go_before_a_smaller_size_is_tried() -> None:
    class Watching(Recorder):
        def capture(self, rows: int, run: Callable[[], None]) -> Callable[[], None]:
            if rows == 4:
                assert not graphs._graphs
            return super().capture(rows, run)

    graphs = GraphRunner(Buckets(24), Watching({8: OutOfMemory()}))
    graphs.capture_all(lambda rows: None)
    assert graphs.fit(4) == 4


def test_a_step_that_cannot_be_captured_is_not_tried_in_other_sizes() -> None:
    recorder = Recorder({16: CaptureError("it waits for the device")})
    graphs, network = runner(recorder, 24)
    assert recorder.asked == [24, 16]
    assert graphs.compute(3, network) == 3
    assert repr(graphs) == ("<GraphRunner 1 to 24 rows run without (it waits for the device); 0 replayed, 1 eager>")


def test_any_other_error_of_a_capture_is_not_hidden() -> None:
    graphs = GraphRunner(Buckets(2), Recorder({2: TypeError("a mistake")}))
    with pytest.raises(TypeError, match="a mistake"):
        graphs.capture_all(lambda rows: None)


def test_before_anything_is_captured_all_run_eagerly() -> None:
    graphs = GraphRunner(Buckets(1), Recorder())
    ran: list[int] = []
    assert graphs.compute(1, ran.append) == 1
    assert ran == [1]
    assert repr(graphs) == "<GraphRunner 1 rows run without (not captured yet); 0 replayed, 1 eager>"


def test_what_an_exception_in_a_replay_leaves_behind_is_gone_with_the_next_fill() -> None:
    network = Network(buffers())
    fails = [False]

    def run(rows: int) -> None:
        network(rows)
        if fails[0]:
            scribble(network.buffers.first(rows))
            raise RuntimeError("lost")

    graphs = GraphRunner(Buckets(MAX_ROWS), Recorder())
    graphs.capture_all(run)
    network.buffers.fill(one())
    fails[0] = True
    with pytest.raises(RuntimeError, match="lost"):
        graphs.compute(1, run)
    fails[0] = False
    network.buffers.fill(one(position=9))
    graphs.compute(1, run)
    fresh = Network(buffers())
    fresh.buffers.fill(one(position=9))
    fresh(1)
    assert state(network.buffers) == state(fresh.buffers)


# The real capture, on a torch.cuda that only notes what is asked of it


class FakeCuda:
    """As much of torch.cuda as a capture uses. `end_fails`: what ending a capture raises."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.current = "default"
        self.pools = 0
        self.end_fails: Exception | None = None
        self.capturing = False

    def install(self, patch: pytest.MonkeyPatch) -> None:
        for name in ("Stream", "CUDAGraph", "graph", "stream", "device", "graph_pool_handle", "synchronize"):
            patch.setattr(torch.cuda, name, getattr(self, name))

    def Stream(self, device: torch.device) -> SimpleNamespace:  # noqa: N802 - torch's names
        return SimpleNamespace(name=f"side of {device}", synchronize=lambda: self.calls.append("stream synchronized"))

    def CUDAGraph(self) -> FakeGraph:  # noqa: N802
        return FakeGraph(self)

    def graph_pool_handle(self) -> int:
        self.pools += 1
        return self.pools

    def synchronize(self, device: torch.device) -> None:
        self.calls.append(f"synchronize {device}")

    @contextmanager
    def device(self, device: torch.device) -> Iterator[None]:
        yield

    @contextmanager
    def stream(self, stream: SimpleNamespace) -> Iterator[None]:
        before, self.current = self.current, stream.name
        try:
            yield
        finally:
            self.current = before

    @contextmanager
    def graph(self, graph: FakeGraph, *, pool: int, stream: SimpleNamespace, capture_error_mode: str) -> Iterator[None]:
        self.calls.append(f"begin pool {pool} {capture_error_mode} on {stream.name}")
        self.current, self.capturing = stream.name, True
        try:
            yield
        finally:
            self.capturing = False
            if self.end_fails is not None:
                raise self.end_fails  # and its stream stays the current one, as torch leaves it
            graph.ended = True
            self.calls.append("end")


class FakeGraph:
    def __init__(self, cuda: FakeCuda) -> None:
        self._cuda = cuda
        self.ended = False

    def pool(self) -> int:
        if not self.ended:
            raise RuntimeError("Called CUDAGraph::pool() without a preceding successful capture.")
        return self._cuda.pools

    def replay(self) -> None:
        self._cuda.calls.append("replay")


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    fake = FakeCuda()
    fake.install(monkeypatch)
    return fake


def test_a_step_is_warmed_up_on_the_captures_stream_and_captured_once_with_no_collection_meanwhile(
    cuda: FakeCuda,
) -> None:
    capture = TorchCapture(torch.device("cuda:1"))

    def run() -> None:
        assert torch.is_inference_mode_enabled()
        assert gc.isenabled() is not cuda.capturing
        cuda.calls.append(f"run on {cuda.current}")

    assert gc.isenabled()
    replay = capture.capture(4, run)
    side = "side of cuda:1"
    assert cuda.calls == [
        "synchronize cuda:1",
        *[f"run on {side}"] * WARM_UPS,
        "stream synchronized",
        f"begin pool 1 thread_local on {side}",
        f"run on {side}",
        "end",
    ]
    assert gc.isenabled()
    assert cuda.current == "default"
    cuda.calls.clear()
    replay()
    assert cuda.calls == ["replay"]
    capture.capture(2, run)
    assert f"begin pool 1 thread_local on {side}" in cuda.calls, "all share one pool"


@pytest.mark.parametrize("warming", [True, False])
@pytest.mark.parametrize(
    ("raised", "expected", "said"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried\nmore"), OutOfMemory, "CUDA out of memory. Tried"),
        (torch.AcceleratorError("CUDA error: out of memory"), OutOfMemory, "CUDA error: out of memory"),
        (OutOfMemory("the model says so"), OutOfMemory, "the model says so"),
        (RuntimeError("operation not permitted when stream is capturing"), CaptureError, "operation not permitted"),
    ],
)
def test_what_a_failed_capture_raises_says_what_failed_and_the_next_one_has_a_new_pool(
    cuda: FakeCuda, raised: Exception, expected: type[Exception], said: str, warming: bool
) -> None:
    capture = TorchCapture(torch.device("cuda"))

    def run() -> None:
        if warming or cuda.capturing:
            raise raised

    with pytest.raises(expected, match=said) as caught:
        capture.capture(4, run)
    assert caught.value.__context__ is None, "it does not keep alive what the step held on the device"
    assert cuda.current == "default"
    assert gc.isenabled()
    capture.capture(2, lambda: None)
    assert "begin pool 2 thread_local on side of cuda" in cuda.calls


def test_a_capture_that_cannot_be_ended_gives_the_stream_back_and_keeps_its_graph(cuda: FakeCuda) -> None:
    capture = TorchCapture(torch.device("cuda"))
    cuda.end_fails = RuntimeError("operation failed due to a previous error during capture")
    with pytest.raises(CaptureError, match="previous error"):
        capture.capture(4, lambda: None)
    assert cuda.current == "default"
    assert [graph.ended for graph in capture._unfinished] == [False]  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("first", "expected", "said"),
    [
        (torch.OutOfMemoryError("CUDA out of memory"), OutOfMemory, "CUDA out of memory"),
        (RuntimeError("it waits for the device"), CaptureError, "it waits for the device"),
    ],
)
def test_where_a_failed_step_leaves_a_capture_that_cannot_be_ended_the_step_says_why(
    cuda: FakeCuda, first: Exception, expected: type[Exception], said: str
) -> None:
    cuda.end_fails = RuntimeError("operation failed due to a previous error during capture")

    def run() -> None:
        if cuda.capturing:
            raise first

    with pytest.raises(expected, match=said):
        TorchCapture(torch.device("cuda")).capture(4, run)
