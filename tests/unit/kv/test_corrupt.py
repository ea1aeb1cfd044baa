"""References and files that are not what they say: only this package's errors come out, and nobody dies of them."""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson
import pytest
import torch
from hypothesis import HealthCheck, assume, event, given, settings
from hypothesis import strategies as st

from prelay_kv.errors import BadKvRef, KvError, SegmentGone
from prelay_kv.importer import Importer
from prelay_kv.layout import KvLayout
from prelay_kv.ref import KvRef
from prelay_kv.segment import domain
from prelay_kv.shm import ShmPool
from prelay_kv.shmfile import MAGIC, PAGE, Header, Parts, pack_header

#: The folder and pool of a test are read, never changed, by its examples.
shared_pool = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=200)

scalars = (
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False) | st.text(max_size=20)
)
near = st.sampled_from([0, 1, -1, 7, 8, 9, 2**31, 2**48, 2**63, 2**64 - 1, "", ".", "..", "shm", "cpu", "prelay-x.kv"])
values = near | st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner)
)


@pytest.fixture
def pool(shm_dir: Path, layout: KvLayout) -> Iterator[ShmPool]:
    with closing(ShmPool.create("peer", layout, shm_dir)) as pool:
        yield pool


@pytest.fixture
def importer(shm_dir: Path, layout: KvLayout) -> Iterator[Importer]:
    importer = Importer(layout.layout_hash, layout.numerics_hash, domain(shm_dir), shm_dir)
    yield importer
    importer.close()


def read_all(pool: torch.Tensor, blocks: tuple[int, ...]) -> None:
    assert pool[list(blocks)].isfinite().all()


def fetch_raw(importer: Importer, raw: bytes) -> KvRef | None:
    """What a worker does with the bytes of a job; None when they were refused."""
    try:
        ref = KvRef.decode(raw)
        importer.fetch(ref, read_all)
    except KvError as error:
        event(type(error).__name__)
        return None
    event("fetched")
    return ref


def spots(data: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path of everything in a JSON value."""
    items = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    for key, inner in items:
        yield (*path, key)
        yield from spots(inner, (*path, key))


def mutate(data: Any, path: tuple[Any, ...], change: str, value: Any) -> None:
    for key in path[:-1]:
        data = data[key]
    if change == "set":
        data[path[-1]] = value
    elif change == "delete":
        del data[path[-1]]
    else:
        data[path[-1]] = [data[path[-1]], value]


@shared_pool
@given(data=st.data())
def test_a_reference_with_changed_parts_is_refused_or_means_the_same_memory(
    pool: ShmPool, importer: Importer, data: st.DataObject
) -> None:
    good = pool.ref([2, 5, 3], [0, 0, 0], tokens=9)
    message = orjson.loads(good.encode())
    for _ in range(data.draw(st.integers(1, 3))):
        path = data.draw(st.sampled_from(list(spots(message)) or [()]))
        if path:
            mutate(message, path, data.draw(st.sampled_from(["set", "set", "delete", "wrap"])), data.draw(values))
    fetched = fetch_raw(importer, orjson.dumps(message))
    assert fetched is None or (fetched.segment == good.segment and fetched.layout == good.layout)


@shared_pool
@given(cut=st.integers(0, 2000), put=st.binary(max_size=4), keep=st.integers(0, 4))
def test_a_reference_with_changed_bytes_is_refused_or_means_the_same_memory(
    pool: ShmPool, importer: Importer, cut: int, put: bytes, keep: int
) -> None:
    good = pool.ref([2, 5, 3], [0, 0, 0], tokens=9)
    raw = good.encode()
    cut = min(cut, len(raw))
    fetched = fetch_raw(importer, raw[:cut] + put + raw[cut + keep :])
    assert fetched is None or (fetched.segment == good.segment and fetched.layout == good.layout)


texts = st.sampled_from(
    ["peer", "cpu", "shm", ".", "..", "/dev/zero", "prelay-.kv", "prelay-peer.kv", "\u0130"]
) | st.text(st.characters(categories=["L", "N", "P", "S"]), min_size=1, max_size=20)
sizes = st.integers(1, 9) | st.sampled_from([2**20, 2**31, 2**40])


@shared_pool
@given(
    parts=st.fixed_dictionaries(
        {},
        optional=dict.fromkeys(("node", "owner", "device", "kind", "handle"), texts)
        | {"offset": st.integers(0, 2**48)},
    ),
    shape=st.fixed_dictionaries(
        {}, optional=dict.fromkeys(("num_blocks", "layers", "kv_heads", "block_size", "head_dim"), sizes)
    ),
    mapped_before=st.booleans(),
)
def test_a_well_formed_reference_to_other_memory_is_refused(
    pool: ShmPool, importer: Importer, parts: dict[str, Any], shape: dict[str, Any], mapped_before: bool
) -> None:
    good = pool.ref([0], [0], tokens=1)
    importer.forget("peer")
    if mapped_before:
        importer.fetch(good, read_all)
    try:
        layout = replace(good.layout, **shape)
    except ValueError:  # more bytes than a pool can have
        assume(False)
    ref = replace(good, segment=replace(good.segment, nbytes=layout.nbytes, **parts), layout=layout)
    fetched = fetch_raw(importer, ref.encode())
    assert fetched == (ref if ref == good else None)


def another_file(pool: ShmPool, data: bytes) -> KvRef:
    """A file of `data` beside the pool's, and the pool's reference with that file's name in it."""
    path = pool.path.with_name("prelay-peer-forged.kv")
    path.write_bytes(data)
    message = orjson.loads(pool.ref([0, 7], [0, 0], tokens=1).encode())
    message["segment"]["handle"] = path.name
    return KvRef.decode(orjson.dumps(message))


def test_an_honest_copy_of_the_file_is_taken(pool: ShmPool, importer: Importer) -> None:
    """So that the refusals below are for what each of them changes."""
    ref = another_file(pool, pool.path.read_bytes())
    importer.fetch(ref, read_all)
    (pool.path.parent / ref.segment.handle).unlink()


_JSON_AT = len(MAGIC) + 8


@pytest.mark.parametrize(
    ("at", "put"),
    [
        (0, b"\0" * 8),
        (8, struct.pack("<I", 2)),
        (12, struct.pack("<I", 0)),
        (12, struct.pack("<I", 2**32 - 1)),
        (_JSON_AT, b"\xff"),
        (_JSON_AT, b'{"owner":"peer","layout":{}}' + b" " * 300),
        (_JSON_AT, b'{"owner":7}' + b" " * 300),
        (_JSON_AT, b"[]" + b" " * 300),
        (_JSON_AT, b'{"owner":"else"'),
    ],
)
def test_a_file_with_a_wrong_header_is_refused(pool: ShmPool, importer: Importer, at: int, put: bytes) -> None:
    data = bytearray(pool.path.read_bytes())
    data[at : at + len(put)] = put
    ref = another_file(pool, bytes(data))
    with pytest.raises(BadKvRef):
        importer.fetch(ref, read_all)
    assert importer.owners() == frozenset()
    (pool.path.parent / ref.segment.handle).unlink()


@pytest.mark.parametrize("length", [0, 1, 15, 16, 100, PAGE - 1, PAGE, 2 * PAGE, -1, 10**6])
def test_a_file_of_another_size_is_refused(pool: ShmPool, importer: Importer, length: int) -> None:
    data = pool.path.read_bytes()
    ref = another_file(pool, (data + bytes(10**6))[: length if length >= 0 else len(data) + length])
    with pytest.raises(BadKvRef) as caught:
        importer.fetch(ref, read_all)
    assert "bytes, not" in caught.value.why
    (pool.path.parent / ref.segment.handle).unlink()


def test_a_file_with_holes_is_refused(pool: ShmPool, importer: Importer, layout: KvLayout) -> None:
    ref = another_file(pool, pack_header(Header("peer", layout)))
    path = pool.path.parent / ref.segment.handle
    os.truncate(path, Parts.of(layout).nbytes)
    with pytest.raises(BadKvRef) as caught:
        importer.fetch(ref, read_all)
    assert "holes" in caught.value.why
    path.unlink()


@pytest.mark.parametrize("kind", ["folder", "pipe", "link", "link to a device"])
def test_a_name_that_is_no_plain_file_is_refused_without_waiting(pool: ShmPool, importer: Importer, kind: str) -> None:
    ref = another_file(pool, b"")
    path = pool.path.parent / ref.segment.handle
    path.unlink()
    if kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to(pool.path if kind == "link" else "/dev/zero")
    with pytest.raises((BadKvRef, SegmentGone)):
        importer.fetch(ref, read_all)
    path.rmdir() if kind == "folder" else path.unlink()


@shared_pool
@given(at=st.integers(0, PAGE), put=st.binary(min_size=1, max_size=64), length=st.integers(0, 20_000))
def test_a_file_with_a_changed_first_page_or_size_is_refused_or_says_the_same(
    pool: ShmPool, importer: Importer, at: int, put: bytes, length: int
) -> None:
    data = bytearray(pool.path.read_bytes())
    data[at : at + len(put)] = put
    if length % 2:
        data = data[:length]
    ref = another_file(pool, bytes(data))
    fetched = fetch_raw(importer, ref.encode())
    importer.forget("peer")
    (pool.path.parent / ref.segment.handle).unlink()
    assert fetched is None or len(data) == Parts.of(pool.layout).nbytes
