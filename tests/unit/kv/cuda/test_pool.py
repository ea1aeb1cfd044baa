"""A pool on a GPU as its owner sees it."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from prelay_kv.cuda.pool import STAMP_NBYTES, CudaPool
from prelay_kv.cuda.runtime import Cudart
from prelay_kv.cuda.tensors import wrap
from prelay_kv.errors import CudaError, GpuTooSmall, ShmTooSmall
from prelay_kv.layout import KvLayout
from prelay_kv.segment import domain
from prelay_kv.shmfile import PAGE, CudaExport, Parts, hold, let_go, read_header
from prelay_kv.sweep import sweep
from tests.bed.cudart import FakeGpus

MIB = 1 << 20


def make(layout: KvLayout, runtime: Cudart, shm_dir: Path, owner: str = "w", device: int = 0) -> CudaPool:
    return CudaPool.create(owner, layout, runtime, device, shm_dir, torch_device="cpu")


@pytest.fixture
def pool(layout: KvLayout, runtime: Cudart, shm_dir: Path) -> Iterator[CudaPool]:
    with closing(make(layout, runtime, shm_dir)) as pool:
        yield pool


def export_of(pool: CudaPool) -> CudaExport:
    export = read_header(pool.path.read_bytes()[:PAGE]).cuda
    assert export is not None
    return export


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_new_pool_is_zero_everywhere(layout: KvLayout, runtime: Cudart, shm_dir: Path, dtype: str) -> None:
    layout = replace(layout, dtype=dtype)
    with closing(make(layout, runtime, shm_dir)) as pool:
        assert (pool.tensor.shape, pool.tensor.dtype) == (layout.shape, getattr(torch, dtype))
        assert pool.tensor.is_contiguous()
        assert not pool.tensor.any()
        assert pool.generations.dtype == np.uint64
        assert pool.generations.tolist() == [0] * 8


def test_the_tensor_is_the_device_s_memory(pool: CudaPool, runtime: Cudart, layout: KvLayout) -> None:
    pool.tensor[3] = 1.5
    pointer = pool.tensor.data_ptr()
    assert runtime.read(pointer + 3 * layout.block_nbytes, 8) == np.full(2, 1.5, np.float32).tobytes()


def test_the_file_beside_has_a_header_and_the_generations_and_no_blocks(pool: CudaPool, layout: KvLayout) -> None:
    pool.generations[7] = 2**63
    data = pool.path.read_bytes()
    assert len(data) == Parts.beside(layout).nbytes == 2 * PAGE
    assert np.frombuffer(data, np.uint64, 8, PAGE).tolist() == [0] * 7 + [2**63]
    header = read_header(data[:PAGE])
    assert (header.owner, header.layout) == ("w", layout)


def test_the_segment_names_the_device_and_the_file(pool: CudaPool, shm_dir: Path, layout: KvLayout) -> None:
    uuid = "GPU-fafafafa-fafa-fafa-fafa-fafafafafa00"
    segment = pool.segment
    assert (segment.kind, segment.device, segment.handle, segment.offset) == (
        "cuda_ipc",
        f"cuda:{uuid}",
        pool.path.name,
        0,
    )
    assert (segment.node, segment.owner, segment.nbytes) == (domain(shm_dir), "w", layout.nbytes)
    assert export_of(pool).uuid == uuid
    pool.ref([3, 1], pool.generations[[3, 1]], tokens=5).encode()


def test_the_header_s_handle_opens_the_blocks_and_behind_them_lies_the_stamp(
    pool: CudaPool, gpus: FakeGpus, runtime: Cudart, layout: KvLayout
) -> None:
    export = export_of(pool)
    pool.tensor[0] = 7
    with gpus.elsewhere():
        mapped = runtime.ipc_open(bytes.fromhex(export.handle))
    assert runtime.read(mapped, 4) == np.float32(7).tobytes()
    assert runtime.read(mapped + layout.nbytes, STAMP_NBYTES).hex() == export.stamp
    runtime.ipc_close(mapped)


@pytest.mark.parametrize("num_blocks", [1, 8, 2 * MIB // 1024, 2 * MIB // 1024 - 1])
def test_the_allocation_is_whole_pieces_of_what_cudamalloc_cuts_from(
    layout: KvLayout, runtime: Cudart, gpus: FakeGpus, shm_dir: Path, num_blocks: int
) -> None:
    layout = replace(layout, num_blocks=num_blocks)
    with closing(make(layout, runtime, shm_dir)) as pool:
        nbytes = export_of(pool).nbytes
        assert nbytes == gpus.used()
        assert nbytes % (2 * MIB) == 0
        assert layout.nbytes + STAMP_NBYTES <= nbytes < layout.nbytes + STAMP_NBYTES + 2 * MIB


def test_two_pools_have_different_stamps(layout: KvLayout, runtime: Cudart, shm_dir: Path) -> None:
    stamps = set()
    for _ in range(2):
        with closing(make(layout, runtime, shm_dir)) as pool:
            stamps.add(export_of(pool).stamp)
    assert len(stamps) == 2


def test_the_longest_header_fits(layout: KvLayout, runtime: Cudart, shm_dir: Path) -> None:
    layout = replace(layout, layout_hash="🧵" * 256, numerics_hash="🧵" * 256)
    with closing(make(layout, runtime, shm_dir, owner="🧵" * 256)) as pool:
        assert read_header(pool.path.read_bytes()[:PAGE]).owner == "🧵" * 256
        assert pool.generations.tolist() == [0] * 8


def test_a_pool_lies_on_the_device_that_is_asked_for(
    layout: KvLayout, runtime: Cudart, gpus: FakeGpus, shm_dir: Path
) -> None:
    gpus.set(devices=2)
    with closing(make(layout, runtime, shm_dir, device=1)) as pool:
        assert pool.segment.device.endswith("01")
        runtime.set_device(1)
        assert gpus.used() == 2 * MIB
        runtime.set_device(0)
        assert gpus.used() == 0
    runtime.set_device(0)


def test_a_device_that_is_too_small_is_an_error_with_the_sizes_and_leaves_nothing(
    layout: KvLayout, runtime: Cudart, gpus: FakeGpus, shm_dir: Path
) -> None:
    gpus.set(memory=5 * MIB)
    with closing(make(layout, runtime, shm_dir)):
        with pytest.raises(GpuTooSmall, match=r"4\.0 MiB on GPU 0, where 3\.0 MiB of 5\.0 MiB are free") as caught:
            make(replace(layout, num_blocks=2 * MIB // layout.block_nbytes), runtime, shm_dir)
        assert (caught.value.needed, caught.value.free, caught.value.total) == (4 * MIB, 3 * MIB, 5 * MIB)
        assert len(list(shm_dir.iterdir())) == 1
        assert gpus.used() == 2 * MIB
    assert gpus.pending_error() == 0


@pytest.mark.parametrize("call", ["cudaSetDevice", "cudaMalloc", "cudaIpcGetMemHandle", "cudaGetDeviceProperties"])
def test_a_call_that_fails_while_the_pool_is_made_leaves_nothing(
    layout: KvLayout, runtime: Cudart, gpus: FakeGpus, shm_dir: Path, call: str
) -> None:
    gpus.set(fail=f"{call}=999")
    with pytest.raises(CudaError, match=call):
        make(layout, runtime, shm_dir)
    gpus.set(fail=None)
    assert gpus.used() == 0
    gc.collect()
    assert list(shm_dir.iterdir()) == []


def test_a_folder_that_is_too_small_is_found_before_the_device_is_asked(
    layout: KvLayout, runtime: Cudart, gpus: FakeGpus, shm_dir: Path
) -> None:
    space = os.statvfs(shm_dir)
    huge = replace(layout, num_blocks=space.f_blocks * space.f_frsize // 8 + 1, layers=1, kv_heads=1, head_dim=1)
    gpus.set(fail="cudaSetDevice=999")
    with pytest.raises(ShmTooSmall):
        make(huge, runtime, shm_dir)


def test_closing_frees_the_blocks_and_removes_the_file_once(
    layout: KvLayout, runtime: Cudart, gpus: FakeGpus, shm_dir: Path
) -> None:
    pool = make(layout, runtime, shm_dir)
    assert "CudaPool" in repr(pool)
    assert "open" in repr(pool)
    pool.close()
    pool.close()
    assert "closed" in repr(pool)
    assert (gpus.used(), gpus.spans(), list(shm_dir.iterdir())) == (0, 0, [])


def test_blocks_that_a_peer_has_mapped_are_not_freed_under_it(
    layout: KvLayout, runtime: Cudart, gpus: FakeGpus, shm_dir: Path
) -> None:
    # Given a pool whose file is held
    pool = make(layout, runtime, shm_dir)
    assert not pool.mapped()
    fd = os.open(pool.path, os.O_RDONLY)
    hold(fd)
    assert pool.mapped()
    # When it is closed, then nobody finds it any more, and its memory is there
    pool.close()
    assert list(shm_dir.iterdir()) == []
    assert gpus.used() == 2 * MIB
    os.close(fd)
    gpus.reset()


def test_a_peer_that_has_let_go_holds_nothing_back(
    layout: KvLayout, runtime: Cudart, gpus: FakeGpus, shm_dir: Path
) -> None:
    pool = make(layout, runtime, shm_dir)
    fd = os.open(pool.path, os.O_RDONLY)
    hold(fd)
    let_go(fd)
    os.close(fd)
    pool.close()
    assert gpus.used() == 0


def test_a_sweep_leaves_a_living_owner_s_file_alone(pool: CudaPool, shm_dir: Path) -> None:
    assert sweep(shm_dir) == ()
    assert pool.path.exists()


def test_a_device_that_breaks_still_lets_the_file_go(
    layout: KvLayout, runtime: Cudart, gpus: FakeGpus, shm_dir: Path
) -> None:
    pool = make(layout, runtime, shm_dir)
    gpus.set(fail="cudaDeviceSynchronize=700")
    with pytest.raises(CudaError):
        pool.close()
    assert list(shm_dir.iterdir()) == []
    gpus.set(fail=None)
    gpus.reset()


@pytest.mark.parametrize("shape", [(3,), (2, 3)])
def test_a_tensor_of_another_size_than_its_memory_is_refused(shape: Any) -> None:
    with pytest.raises(ValueError, match="is not 16 bytes"):
        wrap(4096, 16, torch.float32, shape, "cpu")
