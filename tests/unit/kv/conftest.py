"""A shared-memory folder of the test's own, and the proof that nothing is left in it."""

from __future__ import annotations

import gc
import secrets
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from prelay_kv.layout import KvLayout


@pytest.fixture
def shm_dir() -> Iterator[Path]:
    """A folder on /dev/shm. At the end no file is in it, no descriptor and no mapping of this process points there."""
    folder = Path("/dev/shm") / f"prelay-test-{secrets.token_hex(6)}"
    folder.mkdir()
    yield folder
    gc.collect()
    files = [path.name for path in folder.iterdir()]
    for path in folder.iterdir():
        path.unlink()
    folder.rmdir()
    assert files == []
    assert open_descriptors(folder) == []
    assert mappings(folder) == []


def open_descriptors(folder: Path) -> list[str]:
    found = []
    for link in Path("/proc/self/fd").iterdir():
        try:
            target = str(link.readlink())
        except FileNotFoundError:  # the descriptor that lists the folder
            continue
        if target.startswith(f"{folder}/"):
            found.append(target)
    return found


def mappings(folder: Path) -> list[str]:
    """File paths mapped into this process below `folder`, one per mapping."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return [line.split(maxsplit=5)[5] for line in lines if f"{folder}/" in line]


@pytest.fixture
def mapped(shm_dir: Path) -> Callable[[], int]:
    """Call it for the number of mappings of pools that this process has now."""

    def count() -> int:
        gc.collect()
        return len(mappings(shm_dir))

    return count


@pytest.fixture
def layout() -> KvLayout:
    return KvLayout(
        num_blocks=8,
        layers=2,
        kv_heads=2,
        block_size=4,
        head_dim=8,
        dtype="float32",
        layout_hash="1a2b",
        numerics_hash="3c4d",
    )
