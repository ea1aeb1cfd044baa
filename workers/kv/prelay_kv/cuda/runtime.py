"""The calls of the CUDA runtime (libcudart) that sharing memory needs, as torch does not offer them.

They act on the calling thread's current device: set it first, in each thread. All of them release the interpreter lock.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import re
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..errors import CudaError, NoCudaRuntime

#: Bytes of a cudaIpcMemHandle_t.
HANDLE_NBYTES = 64

#: Names that the dynamic linker is asked for, newest first.
_NAMES = ("libcudart.so.13", "libcudart.so.12")
_MAPS = Path("/proc/self/maps")
#: A line of it that names a runtime, in whatever folder. What follows a name is " (deleted)".
_MAPPED = re.compile(r"(?:\S+\s+){5}(/.*/libcudart[^/\s]*\.so[^/\s]*)")

_OK, _NO_DEVICE = 0, 100
_STREAM_NON_BLOCKING = 1
_COPY_DEFAULT = 4  # the addresses tell which way
_LAZY_PEER_ACCESS = 1
_REGISTER_READ_ONLY = 8

#: Room for a cudaDeviceProp, which has grown and shrunk with the versions (1008 bytes in 13.0). All since 10.0 begin
#: with `char name[256]` and 16 bytes of uuid, and only these are read.
_PROPERTIES_NBYTES = 4096
_NAME_NBYTES, _UUID_NBYTES = 256, 16


class _Handle(ctypes.Structure):
    _fields_ = (("reserved", ctypes.c_ubyte * HANDLE_NBYTES),)


_int, _size, _ptr, _flags = ctypes.c_int, ctypes.c_size_t, ctypes.c_void_p, ctypes.c_uint
_ptr_out, _int_out, _size_out = (ctypes.POINTER(kind) for kind in (_ptr, _int, _size))

_SIGNATURES: dict[str, tuple[Any, ...]] = {
    "cudaGetLastError": (),
    "cudaGetDeviceCount": (_int_out,),
    "cudaSetDevice": (_int,),
    "cudaGetDeviceProperties": (_ptr, _int),
    "cudaDeviceCanAccessPeer": (_int_out, _int, _int),
    "cudaDeviceSynchronize": (),
    "cudaMemGetInfo": (_size_out, _size_out),
    "cudaMalloc": (_ptr_out, _size),
    "cudaFree": (_ptr,),
    "cudaIpcGetMemHandle": (ctypes.POINTER(_Handle), _ptr),
    "cudaIpcOpenMemHandle": (_ptr_out, _Handle, _flags),
    "cudaIpcCloseMemHandle": (_ptr,),
    "cudaStreamCreateWithFlags": (_ptr_out, _flags),
    "cudaStreamSynchronize": (_ptr,),
    "cudaStreamDestroy": (_ptr,),
    "cudaMemcpyAsync": (_ptr, _ptr, _size, _int, _ptr),
    "cudaHostRegister": (_ptr, _size, _flags),
    "cudaHostUnregister": (_ptr,),
}


class Cudart:
    """One libcudart. Safe to use from several threads. Every failed call raises CudaError.

    Pointers, streams and sizes are integers; devices are numbered as this process sees them.
    """

    def __init__(self, path: str | Path) -> None:
        """Load it; nothing is asked of a driver yet. NoCudaRuntime when it does not load or lacks a call."""
        self.path = str(path)
        try:
            self._lib = ctypes.CDLL(self.path)
            for name, arguments in _SIGNATURES.items():
                function = getattr(self._lib, name)
                function.argtypes, function.restype = arguments, _int
            self._lib.cudaGetErrorName.argtypes = (_int,)
            self._lib.cudaGetErrorName.restype = ctypes.c_char_p
        except (OSError, AttributeError) as error:
            raise NoCudaRuntime(f"{self.path} is no CUDA runtime that can be used: {error}") from None

    @classmethod
    def find(cls) -> Cudart:
        """The runtime that torch uses as well; NoCudaRuntime when there is none.

        $PRELAY_CUDART, else what this process has loaded, else the linker's, else the one beside an installed torch.
        """
        if given := os.environ.get("PRELAY_CUDART"):
            try:
                return cls(given)
            except NoCudaRuntime as error:
                raise NoCudaRuntime(f"PRELAY_CUDART={given}: {error}") from None
        for path in _candidates():
            try:
                return cls(path)
            except NoCudaRuntime:
                continue
        raise NoCudaRuntime(f"no CUDA runtime was found ({', '.join(_NAMES)}): set PRELAY_CUDART to its path")

    def __repr__(self) -> str:
        return f"Cudart({self.path})"

    def _call(self, name: str, *arguments: Any) -> None:
        code = getattr(self._lib, name)(*arguments)
        if code != _OK:
            # The error also waits in this thread's state, where torch would find it after its next launch.
            self._lib.cudaGetLastError()
            raise CudaError(name, code, self._error_name(code))

    def _error_name(self, code: int) -> str:
        name: bytes | None = self._lib.cudaGetErrorName(code)
        return name.decode(errors="replace") if name else "unknown error"

    # Devices

    def device_count(self) -> int:
        """How many devices this process sees; 0 without any. CudaError when the driver is missing or too old."""
        count = _int()
        try:
            self._call("cudaGetDeviceCount", ctypes.byref(count))
        except CudaError as error:
            if error.code != _NO_DEVICE:
                raise
            return 0
        return count.value

    def device_uuid(self, device: int) -> str:
        """The device's name on this and every other host, as "GPU-…" or, for a slice of a card, "MIG-…"."""
        properties = ctypes.create_string_buffer(_PROPERTIES_NBYTES)
        self._call("cudaGetDeviceProperties", properties, device)
        kind = "MIG" if b" MIG " in properties.raw[:_NAME_NBYTES] else "GPU"
        return f"{kind}-{uuid.UUID(bytes=properties.raw[_NAME_NBYTES : _NAME_NBYTES + _UUID_NBYTES])}"

    def set_device(self, device: int) -> None:
        """Make `device` the current one of this thread, for torch as well. It stays so."""
        self._call("cudaSetDevice", device)

    def can_access_peer(self, device: int, peer: int) -> bool:
        """Whether kernels and copies of `device` can read the memory of `peer`; False for a device and itself."""
        can = _int()
        self._call("cudaDeviceCanAccessPeer", ctypes.byref(can), device, peer)
        return bool(can.value)

    def device_synchronize(self) -> None:
        """Wait for everything that this process has enqueued on the current device."""
        self._call("cudaDeviceSynchronize")

    def memory(self) -> tuple[int, int]:
        """Free and total bytes of the current device."""
        free, total = _size(), _size()
        self._call("cudaMemGetInfo", ctypes.byref(free), ctypes.byref(total))
        return free.value, total.value

    # Memory

    def malloc(self, nbytes: int) -> int:
        """Device memory of the current device, not cleared. The address is a multiple of 256."""
        pointer = _ptr()
        self._call("cudaMalloc", ctypes.byref(pointer), nbytes)
        return pointer.value or 0

    def free(self, pointer: int) -> None:
        """Give `malloc`'s memory back. Undefined while another process has it mapped."""
        self._call("cudaFree", pointer)

    def ipc_handle(self, pointer: int) -> bytes:
        """64 bytes by which other processes map the *whole* allocation that `pointer` is in."""
        handle = _Handle()
        self._call("cudaIpcGetMemHandle", ctypes.byref(handle), pointer)
        return bytes(handle)

    def ipc_open(self, handle: bytes) -> int:
        """Map another process's allocation for the current device, peer access included; its first byte's address.

        A handle that is open already gives the same address once more, whatever memory it means by now: keep count, and
        close it as often.
        """
        if len(handle) != HANDLE_NBYTES:
            raise ValueError(f"a handle has {HANDLE_NBYTES} bytes, not {len(handle)}")
        pointer = _ptr()
        self._call("cudaIpcOpenMemHandle", ctypes.byref(pointer), _Handle.from_buffer_copy(handle), _LAZY_PEER_ACCESS)
        return pointer.value or 0

    def ipc_close(self, pointer: int) -> None:
        """Undo one `ipc_open`. No copy may be running on it."""
        self._call("cudaIpcCloseMemHandle", pointer)

    def host_register(self, pointer: int, nbytes: int, read_only: bool = False) -> None:
        """Pin host memory of this process, so that copies run at full speed; `read_only` as the device sees it.

        Memory that is mapped read-only can be pinned only so, and not by every device (CudaError 801).
        """
        self._call("cudaHostRegister", pointer, nbytes, _REGISTER_READ_ONLY if read_only else 0)

    def host_unregister(self, pointer: int) -> None:
        self._call("cudaHostUnregister", pointer)

    # Copies

    def stream_create(self) -> int:
        """A stream of the current device that does not wait for the default stream, nor that one for it."""
        stream = _ptr()
        self._call("cudaStreamCreateWithFlags", ctypes.byref(stream), _STREAM_NON_BLOCKING)
        return stream.value or 0

    def stream_destroy(self, stream: int) -> None:
        self._call("cudaStreamDestroy", stream)

    def stream_synchronize(self, stream: int) -> None:
        """Wait until all that was enqueued on `stream` has ended. An error of theirs comes out here."""
        self._call("cudaStreamSynchronize", stream)

    def copy_async(self, dst: int, src: int, nbytes: int, stream: int) -> None:
        """Enqueue a copy between any two of this process's addresses, on host or device. It has not begun."""
        self._call("cudaMemcpyAsync", dst, src, nbytes, _COPY_DEFAULT, stream)

    def write(self, dst: int, data: bytes) -> None:
        """Write a few bytes to device memory and wait for it."""
        source = ctypes.create_string_buffer(data, len(data))
        self._copy(dst, ctypes.addressof(source), len(data))

    def read(self, src: int, nbytes: int) -> bytes:
        """Read a few bytes of device memory."""
        target = ctypes.create_string_buffer(nbytes)
        self._copy(ctypes.addressof(target), src, nbytes)
        return target.raw

    def _copy(self, dst: int, src: int, nbytes: int) -> None:
        stream = self.stream_create()
        try:
            self.copy_async(dst, src, nbytes, stream)
            self.stream_synchronize(stream)
        finally:
            self.stream_destroy(stream)


def _candidates() -> Iterator[str]:
    # A second runtime of another version beside torch's could ask more of the driver than is there.
    yield from _loaded()
    yield from _NAMES
    yield from _beside_torch()


def _loaded() -> Iterator[str]:
    for line in _MAPS.read_text().splitlines():
        if found := _MAPPED.fullmatch(line):
            yield found[1]


def _beside_torch() -> Iterator[str]:
    spec = importlib.util.find_spec("torch")
    if spec is not None and spec.origin is not None:
        packages = Path(spec.origin).parents[1]
        yield from sorted(map(str, packages.glob("nvidia/*/lib/libcudart.so.*")), reverse=True)
