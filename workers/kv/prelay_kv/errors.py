"""Errors of the KV hand-over.

KvError
├── BadKvRef         a reference, or the memory it names, is not what it says; `raw` keeps the bytes
├── LayoutMismatch   the peer's blocks have another layout or other numerics than this worker's
├── SegmentGone      the memory cannot be reached from here: owner and file are gone, or it lies on another host
│   ├── StillMapped  an earlier incarnation's memory is still mapped under the same handle
│   └── NoAccess     it is there, and this process may not or cannot open it
├── StaleKv          a block was handed out again: what was copied must not be used
├── ShmTooSmall      the shared-memory folder has no room for the pool; the message says how much is needed
├── GpuTooSmall      the device has no room for the pool
├── NoCudaRuntime    there is no libcudart that can be loaded
└── CudaError        a call of the CUDA runtime failed; `fatal` when this process cannot use the device any more

A job whose KV cannot be taken over goes back to the first step, whichever of the first four it was.
"""

from __future__ import annotations


class KvError(Exception):
    """KV blocks could not be shared or taken over."""


class BadKvRef(KvError):  # noqa: N818 - reads as the fact it states
    """A KV reference does not parse, or the memory it names contradicts it; `why` says how."""

    def __init__(self, raw: bytes, why: str) -> None:
        super().__init__(f"bad KV reference ({why}): {raw[:200]!r}")
        self.raw = raw
        self.why = why


class LayoutMismatch(KvError):  # noqa: N818
    """The peer's blocks differ in layout or numerics; `which` says in which of the two."""

    def __init__(self, which: str, theirs: str, ours: str) -> None:
        super().__init__(f"the peer's {which} hash is {theirs}, this worker's is {ours}")
        self.which = which


class SegmentGone(KvError):  # noqa: N818
    """The segment's memory cannot be reached from this process."""


class StillMapped(SegmentGone):
    """A handle is open here for other memory that had the same one: forget its `owner` first."""

    def __init__(self, owner: str) -> None:
        super().__init__(f"the same handle is still mapped here for the memory of {owner:.100}, which is gone")
        self.owner = owner


class NoAccess(SegmentGone):
    """The memory is there, and this process cannot open it: a limit, a right, or what its device does not offer."""


class StaleKv(KvError):  # noqa: N818
    """Blocks were handed out again before the copy was finished; `blocks` are their ids."""

    def __init__(self, blocks: tuple[int, ...]) -> None:
        super().__init__(f"{len(blocks)} block(s) were handed out again before the copy ended: {blocks[:8]}")
        self.blocks = blocks


class ShmTooSmall(KvError):  # noqa: N818
    """The shared-memory folder cannot hold the pool. Sizes are bytes."""

    def __init__(self, folder: str, needed: int, free: int, total: int) -> None:
        super().__init__(
            f"the KV pool needs {_mib(needed)} in {folder}, where {_mib(free)} of {_mib(total)} are free: "
            "enlarge it (docker run --shm-size, shm_size in compose; containers get 64 MB) or use fewer blocks"
        )
        self.needed = needed
        self.free = free
        self.total = total


class GpuTooSmall(KvError):  # noqa: N818
    """The device cannot hold the pool. Sizes are bytes."""

    def __init__(self, device: str, needed: int, free: int, total: int) -> None:
        super().__init__(
            f"the KV pool needs {_mib(needed)} on {device}, where {_mib(free)} of {_mib(total)} are free: "
            "use fewer blocks, or end what else runs on this card"
        )
        self.needed = needed
        self.free = free
        self.total = total


class NoCudaRuntime(KvError):  # noqa: N818
    """No libcudart was found, or the one that was named does not load."""


class CudaError(KvError):
    """A call of the CUDA runtime failed. `code` and `name` are the runtime's, as 700 and cudaErrorIllegalAddress."""

    def __init__(self, call: str, code: int, name: str) -> None:
        super().__init__(f"{call}: {name} ({code})")
        self.call = call
        self.code = code
        self.name = name

    @property
    def fatal(self) -> bool:
        """Whether every later call of this process fails as well, so that only a new process helps."""
        return self.code in _FATAL


#: Errors that leave the device's context unusable: memory faults, launches that failed or hung, hardware errors.
_FATAL = frozenset({214, 220, 226, 700, 702, 709, 710, 714, 715, 716, 717, 718, 719, 721})


def _mib(nbytes: int) -> str:
    return f"{nbytes / (1 << 20):.1f} MiB"
