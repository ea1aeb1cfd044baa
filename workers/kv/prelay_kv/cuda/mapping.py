"""A peer's pool on a GPU, mapped by CUDA IPC."""

from __future__ import annotations

import threading
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch

from ..errors import BadKvRef, CudaError, NoAccess, SegmentGone, StillMapped
from ..mapping import FileMapping
from ..peerfile import PeerFile
from ..ref import KvRef
from ..segment import SHM_DIR
from ..shmfile import CudaExport, Parts
from .pool import STAMP_NBYTES
from .runtime import Cudart
from .tensors import wrap

#: Code of cudaIpcOpenMemHandle for a handle of a process that is gone.
_PEER_ENDED = 400
#: What to do about an error of cudaIpcOpenMemHandle.
_ADVICE = {
    1: "the peer's GPU is not visible here: give both processes all GPUs (in containers --gpus all), and choose by "
    "--gpu, not by CUDA_VISIBLE_DEVICES",
    2: "this GPU has no memory left for the mapping: use fewer blocks",
    201: "the exporter seems to be this very process: share the process namespace of the workers (pid: in compose, "
    "--pid, hostPID), or use the pinned path",
    205: "the driver cannot map the peer's GPU here: give both containers all GPUs, and not one claim each",
    217: "there is no peer-to-peer access between these cards: use the pinned path",
    304: "the operating system forbids it: share the IPC and process namespaces of the workers, and their user",
    _PEER_ENDED: "the exporter has ended",
    711: "this GPU is connected to as many peers as it can be: use the pinned path",
    801: "this device cannot share memory, as slices (MIG) cannot: use the pinned path",
}


@dataclass(slots=True)
class _Mapped:
    """An open handle: for whose memory, on which device, and how many mappings share it."""

    incarnation: tuple[str, str]
    device: int
    pointer: int
    users: int = 0


class _Handles:
    """The handles that this process has open. The driver knows one mapping a handle, and gives it for other memory too.

    It is the process's, not an importer's: that is whom the driver counts by.
    """

    def __init__(self) -> None:
        self._mapped: dict[str, _Mapped] = {}
        self._lock = threading.Lock()

    def open(self, handle: str, incarnation: tuple[str, str], runtime: Cudart, device: int) -> int:
        """The address of the memory that `incarnation`, an owner and a file name, exports as `handle`.

        StillMapped when it is open for another; CudaError as from the runtime.
        """
        with self._lock:
            item = self._mapped.get(handle)
            if item is None:
                runtime.set_device(device)
                pointer = runtime.ipc_open(bytes.fromhex(handle))
                item = self._mapped[handle] = _Mapped(incarnation, device, pointer)
            elif item.incarnation != incarnation:
                raise StillMapped(item.incarnation[0])
            elif item.device != device:
                raise SegmentGone(f"{incarnation[1]} is mapped for device {item.device} of this process")
            item.users += 1
            return item.pointer

    def close(self, handle: str, runtime: Cudart) -> None:
        """Undo one `open`; the last one unmaps, once everything that runs on its device has ended."""
        with self._lock:
            item = self._mapped[handle]
            item.users -= 1
            if item.users:
                return
            del self._mapped[handle]
            with ExitStack() as last:
                runtime.set_device(item.device)
                last.callback(runtime.ipc_close, item.pointer)
                runtime.device_synchronize()


_HANDLES = _Handles()


class CudaMapping(FileMapping):
    """The blocks of a `CudaPool`, mapped for one device of this process. They stay readable when the owner dies."""

    def __init__(self, file: PeerFile, export: CudaExport, pool: torch.Tensor, runtime: Cudart) -> None:
        """Take over an open file and handle. Use `open`."""
        super().__init__(file, pool)
        self._handle = export.handle
        self._runtime = runtime

    @classmethod
    def open(
        cls,
        ref: KvRef,
        *,
        runtime: Cudart,
        device: int,
        torch_device: str | None = None,
        shm_dir: Path = SHM_DIR,
    ) -> CudaMapping:
        """Map the memory that `ref` names for `device`, which becomes this thread's current one.

        1. The owner's file, which says what to open (SegmentGone, BadKvRef).
        2. Hold it, so that the owner does not free what is mapped here (SegmentGone).
        3. Open the handle (NoAccess with what to do; SegmentGone; StillMapped; CudaError when this process cannot go
           on).
        4. Look for the owner's stamp: without it this is other memory (SegmentGone).

        `torch_device` is where torch sees the memory; `cuda:DEVICE` unless it is given.
        """
        layout = ref.layout
        with ExitStack() as undo:
            file = PeerFile.open(ref, Parts.beside(layout), shm_dir)  # 1
            undo.callback(file.close)
            export = _export(file, ref)
            file.hold()  # 2
            try:
                incarnation = (ref.segment.owner, ref.segment.handle)
                pointer = _HANDLES.open(export.handle, incarnation, runtime, device)  # 3
                undo.callback(_HANDLES.close, export.handle, runtime)
                runtime.set_device(device)
                stamp = runtime.read(pointer + layout.nbytes, STAMP_NBYTES)  # 4
            except CudaError as error:
                if error.fatal:
                    raise
                kind = SegmentGone if error.code == _PEER_ENDED else NoAccess
                raise kind(f"{ref.segment.handle} on {export.uuid}: {error}{_advice(error)}") from None
            if stamp.hex() != export.stamp:
                raise SegmentGone(f"{ref.segment.handle}: what its handle opens is other memory")
            place = torch_device or f"cuda:{device}"
            pool = wrap(pointer, layout.nbytes, getattr(torch, layout.dtype), layout.shape, place)
            mapping = cls(file, export, pool, runtime)
            undo.pop_all()
            return mapping

    def close(self) -> None:
        """Wait for everything that runs on the device, then unmap. CudaError when the device is broken."""
        self._pool = torch.empty(0)
        with ExitStack() as last:
            last.callback(self._file.close)  # the owner may free its memory from then on, and not earlier
            _HANDLES.close(self._handle, self._runtime)


def _export(file: PeerFile, ref: KvRef) -> CudaExport:
    export = file.header.cuda
    if export is None:
        raise BadKvRef(ref.encode(), "the file names no memory of a GPU")
    if (ref.segment.device, ref.segment.offset) != (f"cuda:{export.uuid}", 0):
        raise BadKvRef(ref.encode(), "no pool on this GPU has this device and offset")
    if export.nbytes < ref.layout.nbytes + STAMP_NBYTES:
        raise BadKvRef(ref.encode(), "the allocation is smaller than its blocks")
    return export


def _advice(error: CudaError) -> str:
    known = error.call == "cudaIpcOpenMemHandle" and error.code in _ADVICE
    return f"; {_ADVICE[error.code]}" if known else ""
