"""The attention kernels compute what the definition says, and a row the same bits whatever is computed beside it."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from prelay_engine.gpu.kernels.attention import attend
from prelay_engine.gpu.kernels.decode import PARTS, decode, scratch, split_keys
from prelay_engine.gpu.kernels.tiles import Shape, Tiles, single_rows, tiles

KV_HEADS, LAYERS, LAYER = 2, 3, 1


@dataclass(slots=True)
class Form:
    """How scores are made, and whether there are sinks."""

    window: int | None = None
    softcap: float | None = None
    sinks: bool = False

    def options(self, heads: int) -> dict[str, Any]:
        sinks = torch.linspace(-2.0, 3.0, heads) if self.sinks else None
        return {"scale": 0.11, "window": self.window, "softcap": self.softcap, "sinks": sinks}


@dataclass(slots=True)
class Story:
    """Sequences of `lengths` keys in one layer of a pool. All other memory of the pool is NaN, as is room in tables."""

    lengths: list[int]
    dtype: torch.dtype = torch.float32
    dim: int = 64
    group: int = 3
    block_size: int = 16
    pool: torch.Tensor = field(init=False)
    tables: torch.Tensor = field(init=False)
    queries: list[torch.Tensor] = field(init=False)  # [key, head, dim] of each sequence: of every position
    keys: list[torch.Tensor] = field(init=False)  # [key, kv_head, dim]
    values: list[torch.Tensor] = field(init=False)

    def __post_init__(self) -> None:
        dice = torch.Generator().manual_seed(sum(self.lengths) + self.dim)
        counts = [-(-length // self.block_size) for length in self.lengths]
        shape = (sum(counts) + 1, LAYERS, 2, KV_HEADS, self.block_size, self.dim)
        self.pool = torch.full(shape, float("nan"), dtype=self.dtype)
        self.tables = torch.full((len(counts), max(counts) + 2), 2**30, dtype=torch.int32)
        self.queries, self.keys, self.values = [], [], []
        blocks = torch.randperm(sum(counts) + 1, generator=dice, dtype=torch.int32)
        for sequence, (count, length) in enumerate(zip(counts, self.lengths, strict=True)):
            own, blocks = blocks[:count], blocks[count:]
            self.tables[sequence, :count] = own
            packed = torch.randn(length, KV_HEADS * (self.group + 2), self.dim, generator=dice).to(self.dtype)
            query, key, value = packed.split([self.heads, KV_HEADS, KV_HEADS], 1)
            self.queries.append(query)
            self.keys.append(key)
            self.values.append(value)
            place = torch.arange(length)
            at = own[place // self.block_size].long()
            self.pool[at, LAYER, 0, :, place % self.block_size] = key
            self.pool[at, LAYER, 1, :, place % self.block_size] = value

    @property
    def heads(self) -> int:
        return KV_HEADS * self.group

    def expected(self, sequence: int, position: int, form: Form) -> torch.Tensor:
        """What one row comes to, [head, dim], by the definition and in float64."""
        options = form.options(self.heads)
        first = 0 if form.window is None else max(0, position - form.window + 1)
        query = self.queries[sequence][position].double().view(KV_HEADS, self.group, self.dim)
        keys, values = (x[sequence][first : position + 1].double() for x in (self.keys, self.values))
        scores = torch.einsum("hgd,nhd->hgn", query, keys) * options["scale"]
        if form.softcap is not None:
            scores = form.softcap * torch.tanh(scores / form.softcap)
        if form.sinks:
            sinks = options["sinks"].double().view(KV_HEADS, self.group, 1)
            scores = torch.cat((scores, sinks), 2)
            values = torch.cat((values, torch.zeros_like(values[:1])))
        return torch.einsum("hgn,nhd->hgd", scores.softmax(-1), values).reshape(self.heads, self.dim)

    def attended(
        self,
        spans: list[tuple[int, int, int]],
        form: Form,
        padding: int = 0,
        exact: bool = True,
        laid: Tiles | None = None,
    ) -> torch.Tensor:
        """What `attend` gives for the rows of spans of (sequence, start, length): [row + padding, head, dim]."""
        query = torch.cat([self.queries[s][start : start + length] for s, start, length in spans])
        rows = len(query) + padding
        query = torch.cat((query, torch.full((padding, *query.shape[1:]), float("nan"), dtype=self.dtype)))
        if laid is None:
            shape = Shape.of(self.dim, self.dtype, self.group, exact)
            laid = tiles([span[1:] for span in spans], shape.rows(self.group), rows)
        out = torch.full_like(query, 7.0)
        tables = self.tables[[s for s, _, _ in spans]]
        attend(self.pool, LAYER, query, laid, tables, out, exact=exact, **form.options(self.heads))
        return out

    def decoded(self, rows: list[tuple[int, int]], form: Form) -> torch.Tensor:
        """What `decode` gives for rows of (sequence, keys that it sees); without keys a row is padding."""
        query = torch.stack([self.queries[s][max(0, length - 1)] for s, length in rows])
        tables, out = self.tables[[s for s, _ in rows]], torch.full_like(query, 7.0)
        work = scratch(len(rows) + 1, self.heads, self.dim, "cpu")
        for memory in work:
            memory.fill_(float("nan"))
        lengths = torch.tensor([length for _, length in rows], dtype=torch.int32)
        decode(self.pool, LAYER, query, tables, lengths, out, work, **form.options(self.heads))
        return out

    def close(self, found: torch.Tensor, sequence: int, position: int, form: Form) -> None:
        atol = 2e-6 if self.dtype == torch.float32 else 2e-3
        torch.testing.assert_close(found.double(), self.expected(sequence, position, form), atol=atol, rtol=atol)


FORMS = [
    Form(),
    Form(window=1),
    Form(window=37),
    Form(softcap=0.7),
    Form(sinks=True),
    Form(window=50, softcap=2.0, sinks=True),
]
MODELS = [
    # dtype, head_dim, group, block_size
    (torch.float32, 64, 1, 16),
    (torch.float32, 80, 3, 64),
    (torch.float32, 128, 4, 1),
    (torch.float16, 64, 8, 64),
    (torch.float16, 80, 4, 16),
    (torch.float16, 128, 3, 16),
    (torch.float16, 96, 1, 24),
    (torch.float16, 256, 2, 16),
]


def block_n(model: tuple[torch.dtype, int, int, int]) -> int:
    dtype, dim, group, _ = model
    return Shape.of(dim, dtype, group).block_n


def story(model: tuple[torch.dtype, int, int, int], lengths: list[int]) -> Story:
    dtype, dim, group, block_size = model
    return Story(lengths, dtype, dim, group, block_size)


@pytest.mark.parametrize(("model", "exact"), [(MODELS[1], True), (MODELS[5], True), (MODELS[5], False)], ids=str)
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_prompts_and_chunks_are_attended_in_every_form(
    model: tuple[torch.dtype, int, int, int], form: Form, exact: bool
) -> None:
    told = story(model, [1, 70, 90])
    spans = [(1, 0, 70), (0, 0, 1), (2, 83, 7)]
    found = told.attended(spans, form, padding=2, exact=exact)
    row = 0
    for sequence, start, length in spans:
        for position in range(start, start + length):
            told.close(found[row], sequence, position, form)
            row += 1
    assert not found[row:].any()


@pytest.mark.parametrize("model", MODELS, ids=str)
def test_prompts_end_before_at_and_after_the_end_of_a_tile_of_keys(model: tuple[torch.dtype, int, int, int]) -> None:
    tile, form = block_n(model), Form(sinks=True)
    told = story(model, [1, tile - 1, tile, tile + 1])
    spans = [(sequence, max(0, length - 5), min(5, length)) for sequence, length in enumerate(told.lengths)]
    found = told.attended(spans, form)
    row = 0
    for sequence, start, length in spans:
        for position in range(start, start + length):
            told.close(found[row], sequence, position, form)
            row += 1


@pytest.mark.parametrize(("dtype", "group"), [(torch.float32, 4), (torch.float16, 3)])
@pytest.mark.parametrize("form", [Form(), Form(window=29), Form(window=40, softcap=2.0, sinks=True)], ids=str)
def test_a_row_has_the_same_bits_alone_in_chunks_and_among_others(dtype: torch.dtype, group: int, form: Form) -> None:
    told = Story([100, 77], dtype, group=group)
    whole = told.attended([(0, 0, 100)], form)
    cuts = [0, 1, 16, 31, 64, 65, 99, 100]
    chunks = [told.attended([(0, a, b - a)], form) for a, b in pairwise(cuts)]
    assert torch.equal(torch.cat(chunks), whole)
    beside = told.attended([(1, 3, 74), (0, 41, 50), (1, 0, 3)], form, padding=3)
    assert torch.equal(beside[74:124], whole[41:91])
    assert torch.equal(torch.cat((beside[124:127], beside[:74])), told.attended([(1, 0, 77)], form))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("form", [Form(), Form(window=29, softcap=2.0, sinks=True)], ids=str)
def test_single_rows_have_the_bits_of_the_same_rows_in_a_chunk(dtype: torch.dtype, form: Form) -> None:
    told, positions = Story([100, 77], dtype), [0, 15, 63, 64, 99]
    whole = told.attended([(0, 0, 100)], form)
    rows = Shape.of(told.dim, dtype, told.group, exact=True).rows(told.group)
    spans = [(0, position, 1) for position in positions]
    together = told.attended(spans, form, padding=1, laid=single_rows([*positions, -1], rows))
    assert torch.equal(together[:-1], whole[positions])
    assert not together[-1].any()
    assert torch.equal(told.attended([(0, 64, 1)], form), whole[64:65])


def test_what_lies_before_the_window_of_all_rows_may_be_anything() -> None:
    told, form = Story([100]), Form(window=20)
    attended, decoded = told.attended([(0, 90, 10)], form), told.decoded([(0, 100)], form)
    told.pool[told.tables[0, 4].long(), LAYER, :, :, :7] = float("nan")  # positions 64 … 70: row 90 begins at 71
    told.tables[0, :4] = 2**30
    assert torch.equal(told.attended([(0, 90, 10)], form), attended)
    assert torch.equal(told.decoded([(0, 100)], form), decoded)


def test_rows_of_no_tile_are_left_as_they_are() -> None:
    told = Story([20])
    rows = Shape.of(told.dim, told.dtype, told.group, exact=True).rows(told.group)
    found = told.attended([(0, 0, 20)], Form(), padding=2, laid=tiles([(0, 0)], rows))
    assert bool((found == 7.0).all())


def lengths_of(split: int) -> list[int]:
    return [1, split - 1, split, split + 1, 3 * split + 5]


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("model", [MODELS[1], MODELS[5]], ids=str)
def test_decoding_rows_are_attended_in_every_form(model: tuple[torch.dtype, int, int, int], form: Form) -> None:
    told = story(model, [150, 9])
    found = told.decoded([(0, 150), (1, 0), (1, 9), (0, 61)], form)
    for row, (sequence, length) in enumerate([(0, 150), (1, 0), (1, 9), (0, 61)]):
        if length:
            told.close(found[row], sequence, length - 1, form)
        else:
            assert not found[row].any()


@pytest.mark.parametrize("model", MODELS, ids=str)
def test_decoding_rows_end_before_at_and_after_the_end_of_a_split(model: tuple[torch.dtype, int, int, int]) -> None:
    lengths, form = lengths_of(split_keys(model[1], model[0])), Form(sinks=True)
    told = story(model, [lengths[-1]])
    found = told.decoded([(0, length) for length in lengths], form)
    for row, length in enumerate(lengths):
        told.close(found[row], 0, length - 1, form)


@pytest.mark.parametrize("form", [Form(), Form(window=400, softcap=2.0, sinks=True)], ids=str)
def test_a_part_takes_a_second_split_where_there_are_more_splits_than_parts(form: Form) -> None:
    split = split_keys(64, torch.float32)
    told = Story([(PARTS + 2) * split + 3])
    for length in (PARTS * split, PARTS * split + 1, told.lengths[0]):
        told.close(told.decoded([(0, length)], form)[0], 0, length - 1, form)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("form", [Form(), Form(window=100, softcap=2.0, sinks=True)], ids=str)
def test_a_decoding_row_has_the_same_bits_alone_and_in_any_batch(dtype: torch.dtype, form: Form) -> None:
    told = Story([300, 40], dtype)
    batch = told.decoded([(1, 40), (0, 300), (0, 0), (0, 129), (1, 1)], form)
    assert torch.equal(told.decoded([(0, 300)], form)[0], batch[1])
    assert torch.equal(told.decoded([(0, 0), (0, 129)], form)[1], batch[3])
    assert torch.equal(told.decoded([(1, 1), (1, 40)], form), batch[[4, 0]])


def test_pools_may_have_more_than_two_to_the_31_numbers(tmp_path: Path) -> None:
    told = Story([20, 5], torch.float16)
    blocks, per_block = 2**31 // told.pool[0].numel() + 20, told.pool[0].numel()
    vast = torch.from_file(str(tmp_path / "pool"), shared=True, size=blocks * per_block, dtype=torch.float16)
    vast = vast.view(blocks, *told.pool.shape[1:])  # sparse: only the pages that are written exist
    vast[-len(told.pool) :] = told.pool
    near, form = (told.attended([(0, 0, 20)], Form()), told.decoded([(0, 20)], Form())), Form()
    told.pool, told.tables = vast, told.tables + (blocks - len(told.pool))
    assert torch.equal(told.attended([(0, 0, 20)], form), near[0])
    assert torch.equal(told.decoded([(0, 20)], form), near[1])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"query": torch.zeros(2, 4, 16, dtype=torch.float16)}, "dtype"),
        ({"out": torch.zeros(2, 4, 32)}, "head_dim"),
        ({"out": torch.zeros(2, 16, 4).transpose(1, 2)}, "lie together"),
        ({"tables": torch.zeros(2, 1, dtype=torch.int64)}, "int32"),
        ({"sinks": torch.zeros(3)}, "sinks"),
    ],
)
def test_what_does_not_fit_is_refused(change: dict[str, torch.Tensor], message: str) -> None:
    given = {
        "query": torch.zeros(2, 4, 16), "out": torch.zeros(2, 4, 16), "tables": torch.zeros(2, 1, dtype=torch.int32),
        "sinks": torch.zeros(4),
    } | change  # fmt: skip
    query, out, tables, sinks = (given[name] for name in ("query", "out", "tables", "sinks"))
    pool, lengths = torch.zeros(1, 1, 2, 2, 4, 16), torch.ones(2, dtype=torch.int32)
    with pytest.raises(ValueError, match=message):
        attend(pool, 0, query, tiles([(0, 2)], 16), tables, out, scale=1.0, sinks=sinks)
    with pytest.raises(ValueError, match=message):
        decode(pool, 0, query, tables, lengths, out, scratch(2, 4, 16, "cpu"), scale=1.0, sinks=sinks)


def test_tiles_of_another_shape_are_refused() -> None:
    x, tables = torch.zeros(2, 4, 16), torch.zeros(1, 1, dtype=torch.int32)
    with pytest.raises(ValueError, match="tiles"):
        attend(torch.zeros(1, 1, 2, 2, 4, 16), 0, x, tiles([(0, 2)], 3), tables, x.clone(), scale=1.0)


def test_scratch_for_fewer_rows_is_refused() -> None:
    x, tables, lengths = torch.zeros(2, 4, 16), torch.zeros(2, 1, dtype=torch.int32), torch.ones(2, dtype=torch.int32)
    with pytest.raises(ValueError, match="scratch"):
        decode(torch.zeros(1, 1, 2, 2, 4, 16), 0, x, tables, lengths, x.clone(), scratch(1, 4, 16, "cpu"), scale=1.0)
