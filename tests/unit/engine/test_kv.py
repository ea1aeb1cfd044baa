from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from prelay_engine.blocks import BlockPool, BlockState
from prelay_engine.contiguous import ContiguousKv
from prelay_engine.errors import NoRoom, UnknownSequence
from prelay_engine.geometry import Geometry
from prelay_engine.kv import KvStore, PagedKv
from prelay_engine.prefix import Chain

GEOMETRY = Geometry(layers=2, kv_heads=3, head_dim=8, dtype=torch.float32)
SIZE = 16
Make = Callable[[int], KvStore]


def paged(blocks: int) -> PagedKv:
    return PagedKv(GEOMETRY, BlockPool(blocks), SIZE, torch.zeros(blocks, *GEOMETRY.block_shape(SIZE)))


def contiguous(blocks: int) -> ContiguousKv:
    return ContiguousKv(GEOMETRY, BlockPool(blocks), SIZE)


@pytest.fixture(params=[paged, contiguous])
def make(request: pytest.FixtureRequest) -> Make:
    return request.param  # type: ignore[no-any-return]


def rows(start: int, length: int, layer: int) -> torch.Tensor:
    """[2, kv_head, length, head_dim], different at every position, layer, head and for keys and values."""
    generator = torch.Generator().manual_seed(7 + layer)
    return torch.randn(2, 3, 512, 8, generator=generator)[:, :, start : start + length]


def write(store: KvStore, key: str, start: int, length: int) -> None:
    stop = -(-(start + length) // 64) * 64
    cursor = store.cursor(key, start, length, 0, stop)
    for layer in range(GEOMETRY.layers):
        cursor.write(layer, rows(start, length, layer))


def read(store: KvStore, key: str, tokens: int, first: int = 0) -> list[tuple[torch.Tensor, torch.Tensor]]:
    cursor = store.cursor(key, tokens - 1, 1, first, -(-tokens // 64) * 64)
    return [tuple(part.clone() for part in cursor.read(layer)) for layer in range(GEOMETRY.layers)]  # type: ignore[misc]


def test_what_was_written_in_chunks_is_read_back_in_order_and_zero_beyond(make: Make) -> None:
    store = make(20)
    store.open("other", 5, 40)
    store.open("a", 100, 300)
    for start, length in ((0, 20), (20, 1), (21, 79)):
        write(store, "a", start, length)
    store.open("late", 30, 30)
    store.grow("a", 101)
    write(store, "a", 100, 1)
    for layer, (keys, values) in enumerate(read(store, "a", 101)):
        assert keys.shape == (1, 3, 128, 8)
        assert torch.equal(torch.stack((keys[0], values[0]))[:, :, :101], rows(0, 101, layer))
        assert not keys[:, :, 101:].any()
        assert not values[:, :, 101:].any()


def test_a_range_that_begins_later_holds_the_later_positions_only(make: Make) -> None:
    store = make(20)
    store.open("a", 130, 130)
    write(store, "a", 0, 130)
    for layer, (keys, _) in enumerate(read(store, "a", 130, first=64)):
        assert torch.equal(keys[0, :, :66], rows(0, 130, layer)[0, :, 64:])


def test_what_a_sequence_left_behind_never_reaches_the_next_one(make: Make) -> None:
    store = make(4)
    store.open("bad", 64, 64)
    cursor = store.cursor("bad", 0, 64, 0, 64)
    for layer in range(GEOMETRY.layers):
        cursor.write(layer, torch.full((2, 3, 64, 8), float("nan")))
        cursor.read(layer)
    store.close("bad")
    store.open("good", 40, 64)
    write(store, "good", 0, 40)
    for keys, values in read(store, "good", 40):
        assert bool(torch.isfinite(keys).all())
        assert bool(torch.isfinite(values).all())


def test_blocks_are_taken_as_positions_need_them_and_given_back_whole(make: Make) -> None:
    store = make(5)
    store.open("a", 17, 80)
    assert store.pool.count("a") == 2
    store.grow("a", 32)
    assert store.pool.count("a") == 2
    store.grow("a", 33)
    assert store.pool.count("a") == 3
    with pytest.raises(NoRoom):
        store.open("b", 33, 40)
    with pytest.raises(NoRoom):
        store.grow("a", 100)
    assert store.pool.free == 2
    store.close("a")
    assert store.pool.free == 5
    store.pool.check()


def test_blocks_of_a_paged_store_imported_into_a_contiguous_one_hold_the_same_keys() -> None:
    source, target = paged(20), contiguous(20)
    source.open("filler", 40, 40)
    source.open("a", 70, 70)
    write(source, "a", 0, 70)
    blocks, generations = source.export("a")
    assert len(blocks) == 5
    assert generations == [1] * 5

    target.open("a", 71, 200, BlockState.COPYING)
    target.import_blocks("a", source.tensor[blocks], 70)
    for (keys, values), (expected_keys, expected_values) in zip(
        read(target, "a", 70), read(source, "a", 70), strict=True
    ):
        assert torch.equal(keys, expected_keys)
        assert torch.equal(values, expected_values)


class Copies(TorchDispatchMode):
    """Counts the copies that torch is told to make."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.sizes: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten.copy_.default, torch.ops.aten.clone.default, torch.ops.aten.index.Tensor):
            self.sizes.append(args[0].numel())
        return func(*args, **(kwargs or {}))


def test_an_import_is_one_copy_a_block_whatever_the_layers_and_heads() -> None:
    target = contiguous(20)
    target.open("a", 71, 200, BlockState.COPYING)
    pool = torch.randn(8, *GEOMETRY.block_shape(SIZE))
    with Copies() as copies:
        target.import_blocks("a", (pool[block] for block in (6, 1, 2, 7, 3)), 70)
    whole = pool[0].numel()
    assert copies.sizes == [whole] * 4 + [whole * 6 // SIZE]


def test_a_hit_in_blocks_copies_nothing_and_one_in_buffers_copies_each_block_once() -> None:
    ids = list(range(100))
    chain = Chain(lambda start, count: ids[start : start + count], SIZE)
    names = [chain[index] for index in range(4)]
    tensor = torch.zeros(20, *GEOMETRY.block_shape(SIZE))
    for store, expected in (
        (PagedKv(GEOMETRY, BlockPool(20), SIZE, tensor, prefix_cache=True), 0),
        (ContiguousKv(GEOMETRY, BlockPool(20), SIZE, prefix_cache=True), 4),
    ):
        store.open("before", 70, 100)
        write(store, "before", 0, 70)
        store.name("before", chain, 0, 4)
        store.close("before")
        with Copies() as copies:
            assert store.open("a", 70, 100, prefix=names) == 4 * SIZE
        assert len(copies.sizes) == expected


def test_an_export_shows_a_new_generation_once_its_blocks_were_handed_out_again() -> None:
    store = paged(2)
    store.open("a", 32, 32)
    blocks, before = store.export("a")
    store.close("a")
    store.open("b", 32, 32)
    assert sorted(store.export("b")[0]) == sorted(blocks)
    assert [int(store.pool.generations[block]) for block in blocks] == [x + 1 for x in before]


def test_an_import_that_comes_short_or_for_nobody_is_refused() -> None:
    store = contiguous(20)
    store.open("a", 40, 40)
    with pytest.raises(ValueError, match="hold 32 positions, not 40"):
        store.import_blocks("a", torch.zeros(2, *GEOMETRY.block_shape(SIZE)), 40)
    with pytest.raises(UnknownSequence):
        store.import_blocks("b", torch.zeros(3, *GEOMETRY.block_shape(SIZE)), 40)


def test_an_import_leaves_the_stale_part_of_the_last_block_out() -> None:
    store = contiguous(20)
    store.open("a", 20, 64)
    block = torch.full((2, *GEOMETRY.block_shape(SIZE)), float("nan"))
    block[0], block[1, :, :, :, :4] = 1.0, 1.0
    store.import_blocks("a", block, 20)
    for keys, values in read(store, "a", 20):
        assert bool(torch.isfinite(keys).all() & torch.isfinite(values).all())


def test_imports_run_in_another_thread_while_other_sequences_are_written_and_read() -> None:
    store = contiguous(200)
    blocks = torch.randn(8, *GEOMETRY.block_shape(SIZE))
    store.open("here", 128, 128)
    for i in range(10):
        store.open(f"in {i}", 128, 128, BlockState.COPYING)

    def bring_in() -> None:
        for i in range(10):
            store.import_blocks(f"in {i}", blocks, 128)

    copier = threading.Thread(target=bring_in)
    copier.start()
    for start in range(128):
        write(store, "here", start, 1)
    copier.join()
    expected = blocks.permute(1, 2, 3, 0, 4, 5).reshape(2, 2, 3, 128, 8)
    for i in range(10):
        for layer, (keys, values) in enumerate(read(store, f"in {i}", 128)):
            assert torch.equal(torch.stack((keys[0], values[0])), expected[layer])
    for layer, (keys, _) in enumerate(read(store, "here", 128)):
        assert torch.equal(keys[0], rows(0, 128, layer)[0])


def test_a_tensor_of_another_shape_or_dtype_is_refused() -> None:
    with pytest.raises(ValueError, match="KV tensor"):
        PagedKv(GEOMETRY, BlockPool(3), SIZE, torch.zeros(4, *GEOMETRY.block_shape(SIZE)))
    with pytest.raises(ValueError, match="bfloat16"):
        PagedKv(GEOMETRY, BlockPool(3), SIZE, torch.zeros(3, *GEOMETRY.block_shape(SIZE), dtype=torch.bfloat16))


def test_a_buffer_the_system_refuses_is_no_room_and_takes_no_blocks() -> None:
    store = contiguous(4)
    with pytest.raises(NoRoom, match="cannot map"):
        store.open("a", 16, 1 << 46)
    assert store.pool.free == 4
