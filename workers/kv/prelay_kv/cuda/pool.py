"""A KV pool in the memory of a GPU, exported by CUDA IPC."""

from __future__ import annotations

import secrets
from contextlib import ExitStack
from pathlib import Path

import torch

from ..errors import CudaError, GpuTooSmall
from ..layout import KvLayout
from ..owned import OwnedFile
from ..pool import KvPool
from ..segment import SHM_DIR, Segment
from ..shmfile import CudaExport, Header, Parts
from .runtime import Cudart
from .tensors import wrap

#: What cudaMalloc cuts smaller allocations from. A handle means such a piece as a whole, so a pool never shares one.
_GRAIN_NBYTES = 2 << 20
#: Bytes that tell this allocation from another's under the same handle; they lie behind the blocks.
STAMP_NBYTES = 32

_OUT_OF_MEMORY = 2


class CudaPool(KvPool):
    """A pool whose blocks are one allocation on a GPU. Its file has the header and the generation table only.

    A process makes one in its life: what peers have mapped is never freed while this process lives, and freed memory's
    handle can come back for other memory. `tensor` must not be touched once the pool is closed.
    """

    def __init__(
        self, file: OwnedFile, segment: Segment, layout: KvLayout, tensor: torch.Tensor, runtime: Cudart, device: int
    ) -> None:
        """Take over the memory of `tensor`. Use `create`."""
        super().__init__(file, segment, layout, tensor)
        self._runtime = runtime
        self._device = device
        self._pointer = tensor.data_ptr()

    @classmethod
    def create(
        cls,
        owner: str,
        layout: KvLayout,
        runtime: Cudart,
        device: int,
        shm_dir: Path = SHM_DIR,
        torch_device: str | None = None,
    ) -> CudaPool:
        """Make the pool of worker incarnation `owner` on `device`, which becomes this thread's current one.

        1. The file, locked: its folder may be too small (ShmTooSmall), or not writable (OSError).
        2. The blocks, zero: the device may be too small (GpuTooSmall).
        3. The stamp behind them, the handle, and last the header that tells others of both (CudaError).

        `torch_device` is where torch sees the memory; `cuda:DEVICE` unless it is given.
        """
        with ExitStack() as undo:
            file = OwnedFile.create(owner, layout, Parts.beside(layout), shm_dir)  # 1
            undo.callback(file.close)
            runtime.set_device(device)
            nbytes = -(-(layout.nbytes + STAMP_NBYTES) // _GRAIN_NBYTES) * _GRAIN_NBYTES
            pointer = _malloc(runtime, device, nbytes)  # 2
            undo.callback(runtime.free, pointer)
            place = torch_device or f"cuda:{device}"
            tensor = wrap(pointer, layout.nbytes, getattr(torch, layout.dtype), layout.shape, place)
            tensor.zero_()
            runtime.device_synchronize()  # streams that do not wait for torch's must not meet the zeros later
            uuid = runtime.device_uuid(device)
            stamp = secrets.token_bytes(STAMP_NBYTES)  # 3
            runtime.write(pointer + layout.nbytes, stamp)
            export = CudaExport(runtime.ipc_handle(pointer).hex(), uuid, nbytes, stamp.hex())
            file.write_header(Header(owner, layout, export))
            pool = cls(file, file.segment("cuda_ipc", f"cuda:{uuid}", 0), layout, tensor, runtime, device)
            undo.pop_all()
            return pool

    def mapped(self) -> bool:
        """Whether a peer has the blocks mapped now."""
        return self._file.held()

    def close(self) -> None:
        """Keep newcomers out, and free the blocks once all that runs on the device has ended; again does nothing.

        Blocks that a peer has mapped stay, as they are, until this process has ended and the peer has let go: freeing
        them under a peer's copy is undefined. Peers are asked after the file is gone, so none comes meanwhile.
        """
        if self._file.closed:
            return
        self._drop_views()
        with ExitStack() as last:
            last.callback(self._file.close)
            self._file.unlink()
            if not self._file.held():
                self._runtime.set_device(self._device)
                self._runtime.device_synchronize()
                self._runtime.free(self._pointer)


def _malloc(runtime: Cudart, device: int, nbytes: int) -> int:
    try:
        return runtime.malloc(nbytes)
    except CudaError as error:
        if error.code != _OUT_OF_MEMORY:
            raise
    raise GpuTooSmall(f"GPU {device}", nbytes, *runtime.memory())
