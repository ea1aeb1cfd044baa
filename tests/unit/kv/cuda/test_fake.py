"""The fake CUDA runtime keeps the rules of CUDA IPC: each test breaks one on purpose, and sees what it gets.

Two processes are in tests/integration/test_cuda_processes.py; here this process takes another number.
"""

from __future__ import annotations

import ctypes
import mmap
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from prelay_kv.cuda.runtime import Cudart
from prelay_kv.errors import CudaError
from tests.bed.cudart import FakeGpus

MIB = 1 << 20


def code_of(call: object, *arguments: object) -> int:
    assert callable(call)
    with pytest.raises(CudaError) as caught:
        call(*arguments)
    return caught.value.code


def test_the_exporting_process_cannot_open_its_own_handle(gpus: FakeGpus, runtime: Cudart) -> None:
    pointer = runtime.malloc(MIB)
    handle = runtime.ipc_handle(pointer)
    assert code_of(runtime.ipc_open, handle) == 201
    # What counts is the number: two containers whose workers are both process 1 are one process to the driver
    with gpus.elsewhere():
        runtime.ipc_close(runtime.ipc_open(handle))
    runtime.free(pointer)


def test_an_allocation_is_mapped_once_and_counted(gpus: FakeGpus, runtime: Cudart) -> None:
    pointer = runtime.malloc(MIB)
    handle = runtime.ipc_handle(pointer)
    with gpus.elsewhere():
        first = runtime.ipc_open(handle)
        assert runtime.ipc_open(handle) == first != pointer
        assert gpus.spans() == 2
    runtime.ipc_close(first)
    assert runtime.read(first, 1) == b"\xcb"
    runtime.ipc_close(first)
    assert gpus.spans() == 1
    assert code_of(runtime.ipc_close, first) == 1
    assert code_of(runtime.read, first, 1) == 1
    runtime.free(pointer)


def test_what_one_side_writes_the_other_reads(gpus: FakeGpus, runtime: Cudart) -> None:
    pointer = runtime.malloc(MIB)
    with gpus.elsewhere():
        mapped = runtime.ipc_open(runtime.ipc_handle(pointer))
    runtime.write(pointer + 100, b"here")
    assert runtime.read(mapped + 100, 4) == b"here"
    runtime.ipc_close(mapped)
    runtime.free(pointer)


def test_a_handle_means_the_whole_allocation(gpus: FakeGpus, runtime: Cudart) -> None:
    pointer = runtime.malloc(MIB)
    runtime.write(pointer, b"base")
    runtime.write(pointer + 4096, b"part")
    handle = runtime.ipc_handle(pointer + 4096)
    assert handle == runtime.ipc_handle(pointer)
    with gpus.elsewhere():
        mapped = runtime.ipc_open(handle)
    assert runtime.read(mapped, 4) == b"base"  # and not "part": the offset has to travel beside
    runtime.ipc_close(mapped)
    runtime.free(pointer)


def test_memory_at_a_freed_address_has_the_same_handle_and_opens_as_the_old_one(
    gpus: FakeGpus, runtime: Cudart
) -> None:
    # Given a mapping of memory that was freed meanwhile
    old = runtime.malloc(MIB)
    handle = runtime.ipc_handle(old)
    runtime.write(old, b"old")
    with gpus.elsewhere():
        mapped = runtime.ipc_open(handle)
        runtime.free(old)
        # When the exporter allocates again
        gpus.set(pid=None)
        new = runtime.malloc(MIB)
        runtime.write(new, b"new")
        assert (new, runtime.ipc_handle(new)) == (old, handle)
        # Then its handle opens the old memory, and the new one only once the old is closed
        gpus.set(pid=7)
        assert runtime.ipc_open(handle) == mapped
        assert runtime.read(mapped, 3) == b"old"
        runtime.ipc_close(mapped)
        runtime.ipc_close(mapped)
        mapped = runtime.ipc_open(handle)
        assert runtime.read(mapped, 3) == b"new"
    runtime.ipc_close(mapped)
    runtime.free(new)


def test_freed_memory_stays_and_is_counted_until_the_last_mapping_is_closed(gpus: FakeGpus, runtime: Cudart) -> None:
    pointer = runtime.malloc(MIB)
    runtime.write(pointer, b"kept")
    with gpus.elsewhere():
        mapped = runtime.ipc_open(runtime.ipc_handle(pointer))
    runtime.free(pointer)
    assert gpus.used() == MIB
    assert runtime.read(mapped, 4) == b"kept"
    runtime.ipc_close(mapped)
    assert gpus.used() == 0


def test_freed_memory_s_handle_opens_nothing(gpus: FakeGpus, runtime: Cudart) -> None:
    pointer = runtime.malloc(MIB)
    handle = runtime.ipc_handle(pointer)
    runtime.free(pointer)
    with gpus.elsewhere():
        assert code_of(runtime.ipc_open, handle) == 400


def test_cards_without_peer_access_cannot_map_each_other(gpus: FakeGpus, runtime: Cudart) -> None:
    gpus.set(devices=3, no_p2p="0-1")
    pointer = runtime.malloc(MIB)
    handle = runtime.ipc_handle(pointer)
    assert [runtime.can_access_peer(0, 1), runtime.can_access_peer(1, 0), runtime.can_access_peer(0, 2)] == [
        False,
        False,
        True,
    ]
    with gpus.elsewhere():
        runtime.set_device(1)
        assert code_of(runtime.ipc_open, handle) == 217
        runtime.set_device(2)
        runtime.ipc_close(runtime.ipc_open(handle))
    gpus.set(no_p2p="all")
    assert not runtime.can_access_peer(0, 2)
    runtime.free(pointer)


def test_a_card_that_is_not_visible_cannot_be_mapped(gpus: FakeGpus, runtime: Cudart) -> None:
    gpus.set(devices=2)
    pointer = runtime.malloc(MIB)
    handle = runtime.ipc_handle(pointer)
    gpus.set(visible="1")
    assert runtime.device_count() == 1
    with gpus.elsewhere():
        assert code_of(runtime.ipc_open, handle) == 1
    runtime.free(pointer)


def test_one_context_of_a_process_maps_a_handle(gpus: FakeGpus, runtime: Cudart) -> None:
    gpus.set(devices=2)
    pointer = runtime.malloc(MIB)
    handle = runtime.ipc_handle(pointer)
    with gpus.elsewhere():
        mapped = runtime.ipc_open(handle)
        runtime.set_device(1)
        assert code_of(runtime.ipc_open, handle) == 1
    runtime.ipc_close(mapped)
    runtime.free(pointer)


def test_a_copy_moves_nothing_before_its_stream_is_synchronised(runtime: Cudart) -> None:
    pointer, stream = runtime.malloc(MIB), runtime.stream_create()
    runtime.write(pointer, b"old")
    source = ctypes.create_string_buffer(b"new", 3)
    runtime.copy_async(pointer, ctypes.addressof(source), 3, stream)
    assert runtime.read(pointer, 3) == b"old"
    source.raw = b"now"  # the source is read as late as the target is written
    runtime.stream_synchronize(stream)
    assert runtime.read(pointer, 3) == b"now"
    runtime.stream_destroy(stream)
    runtime.free(pointer)


def test_a_copy_may_also_end_by_itself(gpus: FakeGpus, runtime: Cudart) -> None:
    gpus.set(copy_ms=5)
    pointer, stream = runtime.malloc(MIB), runtime.stream_create()
    ctypes.memset(pointer, 0, 1)
    source = ctypes.create_string_buffer(b"x", 1)
    runtime.copy_async(pointer, ctypes.addressof(source), 1, stream)
    assert ctypes.string_at(pointer, 1) == b"\0"
    end = time.monotonic() + 30
    while ctypes.string_at(pointer, 1) != b"x":
        assert time.monotonic() < end
        time.sleep(0.001)
    runtime.stream_destroy(stream)
    runtime.free(pointer)


def test_synchronising_a_device_runs_its_streams_only(gpus: FakeGpus, runtime: Cudart) -> None:
    gpus.set(devices=2)
    pointer, stream = runtime.malloc(MIB), runtime.stream_create()
    runtime.write(pointer, b"0")
    source = ctypes.create_string_buffer(b"1", 1)
    runtime.copy_async(pointer, ctypes.addressof(source), 1, stream)
    runtime.set_device(1)
    runtime.device_synchronize()
    assert runtime.read(pointer, 1) == b"0"
    runtime.set_device(0)
    runtime.device_synchronize()
    assert runtime.read(pointer, 1) == b"1"
    runtime.stream_destroy(stream)
    runtime.free(pointer)


def test_memory_unmapped_before_the_copy_ran_breaks_the_device_for_good(gpus: FakeGpus, runtime: Cudart) -> None:
    pointer, target, stream = runtime.malloc(MIB), runtime.malloc(MIB), runtime.stream_create()
    with gpus.elsewhere():
        mapped = runtime.ipc_open(runtime.ipc_handle(pointer))
    runtime.copy_async(target, mapped, 16, stream)
    runtime.ipc_close(mapped)
    assert code_of(runtime.stream_synchronize, stream) == 700
    assert code_of(runtime.malloc, MIB) == 700
    assert code_of(runtime.free, target) == 700
    gpus.reset()


def test_more_memory_than_the_device_has_is_refused(gpus: FakeGpus, runtime: Cudart) -> None:
    gpus.set(memory=3 * MIB)
    pointer = runtime.malloc(2 * MIB)
    assert code_of(runtime.malloc, 2 * MIB) == 2
    assert runtime.memory() == (MIB, 3 * MIB)
    runtime.free(pointer)
    runtime.free(runtime.malloc(3 * MIB))


def test_new_memory_is_not_clear(runtime: Cudart) -> None:
    pointer = runtime.malloc(MIB)
    assert runtime.read(pointer + MIB - 1, 1) != b"\0"
    runtime.free(pointer)


def test_an_address_is_freed_once_and_only_by_its_owner(gpus: FakeGpus, runtime: Cudart) -> None:
    pointer = runtime.malloc(MIB)
    with gpus.elsewhere():
        mapped = runtime.ipc_open(runtime.ipc_handle(pointer))
    assert code_of(runtime.free, mapped) == 1
    assert code_of(runtime.ipc_handle, mapped) == 1
    assert code_of(runtime.free, pointer + 256) == 1
    runtime.ipc_close(mapped)
    runtime.free(pointer)
    assert code_of(runtime.free, pointer) == 1


def test_each_thread_has_its_own_current_device(gpus: FakeGpus, runtime: Cudart) -> None:
    gpus.set(devices=2, memory=4 * MIB)
    runtime.set_device(1)
    pointer = runtime.malloc(3 * MIB)
    seen: list[int] = []
    thread = threading.Thread(target=lambda: seen.append(runtime.memory()[0]))
    thread.start()
    thread.join()
    assert (seen, runtime.memory()[0]) == ([4 * MIB], MIB)
    runtime.free(pointer)
    runtime.set_device(0)
    assert code_of(runtime.set_device, 2) == 101


def test_host_memory_is_pinned_once(runtime: Cudart) -> None:
    memory = ctypes.create_string_buffer(8192)
    address = ctypes.addressof(memory)
    runtime.host_register(address, 8192)
    assert code_of(runtime.host_register, address + 100, 10) == 712
    runtime.host_unregister(address)
    assert code_of(runtime.host_unregister, address) == 713


def test_memory_that_may_not_be_written_is_pinned_read_only_where_the_device_can(
    gpus: FakeGpus, runtime: Cudart, tmp_path: Path
) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(8192))
    with path.open("rb") as file:
        memory = np.frombuffer(mmap.mmap(file.fileno(), 8192, mmap.MAP_SHARED, mmap.PROT_READ), dtype=np.uint8)
    address = memory.ctypes.data
    assert code_of(runtime.host_register, address, 8192) == 1
    runtime.host_register(address, 8192, read_only=True)
    runtime.host_unregister(address)
    gpus.set(no_read_only=1)
    assert code_of(runtime.host_register, address, 8192, True) == 801
