"""Layout, segment and reference: what they compute and what they refuse."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prelay_kv.errors import BadKvRef
from prelay_kv.layout import ITEM_BYTES, KvLayout
from prelay_kv.ref import KvRef
from prelay_kv.segment import Segment, domain


def make_segment(layout: KvLayout) -> Segment:
    return Segment(
        node="00ff",
        owner="worker-7/incarnation",
        device="cpu",
        kind="shm",
        handle="prelay-worker-7-0123456789abcdef.kv",
        offset=8192,
        nbytes=layout.nbytes,
        layout_hash=layout.layout_hash,
        numerics_hash=layout.numerics_hash,
    )


def make_ref(layout: KvLayout) -> KvRef:
    return KvRef(make_segment(layout), blocks=(5, 0, 7), generations=(1, 2**64 - 1, 0), tokens=10, layout=layout)


def test_a_block_is_counted_with_its_keys_and_values_of_all_layers(layout: KvLayout) -> None:
    assert layout.shape == (8, 2, 2, 2, 4, 8)
    assert layout.block_nbytes == 2 * 2 * 2 * 4 * 8 * 4
    assert layout.nbytes == 8 * layout.block_nbytes
    assert replace(layout, dtype="bfloat16").nbytes == layout.nbytes // 2


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("num_blocks", 0),
        ("layers", -1),
        ("kv_heads", True),
        ("block_size", 16.0),
        ("head_dim", "64"),
        ("dtype", "float64"),
        ("dtype", ["float32"]),
        ("layout_hash", ""),
        ("layout_hash", None),
        ("numerics_hash", "x" * 257),
        ("numerics_hash", "\ud800"),
        ("num_blocks", 2**48 + 1),
        ("num_blocks", 2**48),  # allowed alone, but not as 2**58 bytes and more
    ],
)
def test_a_layout_that_cannot_be_is_refused_with_the_field_named(layout: KvLayout, field: str, value: Any) -> None:
    layout = replace(layout, head_dim=2**12)
    name = "nbytes" if value == 2**48 else field
    with pytest.raises(ValueError, match=name):
        replace(layout, **{field: value})


def test_a_reference_survives_its_encoding(layout: KvLayout) -> None:
    ref = make_ref(layout)
    assert KvRef.decode(ref.encode()) == ref
    assert Segment.decode(ref.segment.encode()) == ref.segment
    assert b"\x80" not in ref.encode()  # text, nothing pickled
    orjson.loads(ref.encode())


whole = st.integers(1, 64)


@given(
    sizes=st.tuples(whole, whole, whole, whole, whole),
    dtype=st.sampled_from(sorted(ITEM_BYTES)),
    picks=st.lists(
        st.tuples(st.integers(0, 63), st.integers(0, 2**64 - 1)), min_size=1, unique_by=lambda pick: pick[0]
    ),
    owner=st.text(st.characters(categories=["L", "N", "P", "S"]), min_size=1, max_size=256),
)
def test_every_valid_reference_survives_its_encoding(
    sizes: tuple[int, int, int, int, int], dtype: str, picks: list[tuple[int, int]], owner: str
) -> None:
    tokens, layers, kv_heads, block_size, head_dim = sizes
    layout = KvLayout(64, layers, kv_heads, block_size, head_dim, dtype, layout_hash="1a2b", numerics_hash="3c4d")
    segment = replace(make_segment(layout), owner=owner)
    blocks, generations = zip(*picks, strict=True)
    ref = KvRef(segment, blocks, generations, min(tokens, len(blocks) * layout.block_size), layout)
    assert KvRef.decode(ref.encode()) == ref


def test_a_decode_error_keeps_the_raw_bytes() -> None:
    for raw in (b"", b"{", b"\xff\xfe", b"[]", b"null", b'{"segment":{}}', b"[" * 5000):
        with pytest.raises(BadKvRef) as caught:
            KvRef.decode(raw)
        assert caught.value.raw == raw
        with pytest.raises(BadKvRef) as caught:
            Segment.decode(raw)
        assert caught.value.raw == raw


def _changed(ref: KvRef, path: str, value: object) -> bytes:
    data = orjson.loads(ref.encode())
    *parents, last = path.split(".")
    inner = data
    for name in parents:
        inner = inner[name]
    inner[last] = value
    return orjson.dumps(data)


@pytest.mark.parametrize(
    ("path", "value", "why"),
    [
        ("generations", [1, 2], "3 blocks but 2 generations"),
        ("blocks", [5, 0], "tokens"),
        ("blocks", [5, 0, 8], "blocks"),
        ("blocks", [5, 0, -1], "blocks"),
        ("blocks", [5, 0, 5], "twice"),
        ("blocks", [5, 0, True], "blocks"),
        ("blocks", [], "tokens"),
        ("blocks", "507", "blocks"),
        ("blocks", 5, "iterable"),
        ("generations", [1, 2, 3.0], "generations"),
        ("generations", [1, 2, None], "generations"),
        ("tokens", 13, "tokens"),
        ("tokens", 0, "tokens"),
        ("tokens", "10", "tokens"),
        ("segment", None, "Segment"),
        ("segment.nbytes", 1, "disagree"),
        ("segment.layout_hash", "other", "disagree"),
        ("segment.numerics_hash", "other", "disagree"),
        ("segment.offset", -1, "offset"),
        ("segment.handle", 3, "handle"),
        ("segment.owner", "a\nb", "owner"),
        ("layout.num_blocks", 4, "blocks"),
        ("layout.dtype", "bfloat16", "disagree"),
        ("layout.extra", 1, "exactly"),
        ("surprise", 1, "exactly"),
    ],
)
def test_a_reference_that_contradicts_itself_is_bad(layout: KvLayout, path: str, value: object, why: str) -> None:
    with pytest.raises(BadKvRef) as caught:
        KvRef.decode(_changed(make_ref(layout), path, value))
    assert why in caught.value.why


def test_a_generation_past_64_bits_is_bad(layout: KvLayout) -> None:
    raw = make_ref(layout).encode().replace(str(2**64 - 1).encode(), str(2**64).encode())
    with pytest.raises(BadKvRef) as caught:
        KvRef.decode(raw)
    assert "generations" in caught.value.why


def test_the_domain_is_the_same_wherever_the_memory_is_the_same(shm_dir: Path) -> None:
    assert domain() == domain(shm_dir)
    assert domain() != domain(Path("/proc"))  # another file system, as another container's /dev/shm is
    assert int(domain(), 16) >= 0
