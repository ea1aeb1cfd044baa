"""How many blocks and threads each worker gets when nobody says. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from .errors import BadUsage, TooSmall
from .geometry import Geometry
from .host import SHM, Host, size
from .settings import Settings

#: Full contexts that a prefill pool holds when there is room: finished prompts wait in it for a decode worker.
PREFILL_CONTEXTS = 2
#: Blocks of a worker with the null model, whose KV is a few bytes.
NULL_BLOCKS = 4096


@dataclass(frozen=True, slots=True)
class Sizes:
    """Per worker: blocks of a decode or unified pool, blocks of a prefill pool, threads. 0 blocks: as many as fit."""

    kv_blocks: int
    prefill_kv_blocks: int
    threads: int


def sizes(settings: Settings, geometry: Geometry | None, host: Host) -> Sizes:
    """Decide for one host that runs the workers `settings` counts. No geometry is the null model.

    Raise TooSmall, naming the size needed, when the memory cannot hold one full context per worker, and BadUsage when
    sequences longer than the model's context are asked for: each worker would say so by itself, after loading.
    """
    prefill, decode, unified = settings.counts()
    threads = settings.threads or _threads(settings, geometry, host)
    if geometry is None:
        return Sizes(settings.kv_blocks or NULL_BLOCKS, settings.prefill_kv_blocks or NULL_BLOCKS, threads)
    if settings.on_gpus:
        return Sizes(settings.kv_blocks or 0, settings.prefill_kv_blocks or 0, settings.threads or 1)
    pool = _Pool(settings, geometry, host)
    pool.check(prefill, decode + unified)
    return Sizes(pool.decode(decode + unified), pool.prefill(prefill), threads)


def _threads(settings: Settings, geometry: Geometry | None, host: Host) -> int:
    """All cores for each worker, whose native kernels give way to each other task by task; torch's threads do not.

    Measured on two cores with one prefill and one decode worker (docs/performance.md).
    """
    native = settings.kernels == "native" or (settings.kernels == "auto" and host.has_kernels)
    share = max(1, host.cores // max(1, sum(settings.counts())))
    return host.cores if native and geometry is not None else share


def pool_bytes(settings: Settings, geometry: Geometry | None, host: Host, planned: Sizes) -> tuple[int, int]:
    """Return the bytes of all decode and unified pools, in memory, and of all prefill pools, in /dev/shm."""
    if geometry is None:
        return 0, 0
    prefill, decode, unified = settings.counts()
    block = _Pool(settings, geometry, host).block_bytes
    return block * planned.kv_blocks * (decode + unified), block * planned.prefill_kv_blocks * prefill


class _Pool:
    def __init__(self, settings: Settings, geometry: Geometry, host: Host) -> None:
        self.settings, self.host = settings, host
        element = 2 if settings.dtype == "bfloat16" or (settings.dtype == "auto" and host.has_bf16) else 4
        self.block_bytes = geometry.token_bytes(element) * settings.block_size
        self.context = settings.max_model_len or geometry.context_len
        self.model_context = geometry.context_len
        self.context_blocks = -(-self.context // settings.block_size)

    def decode(self, workers: int) -> int:
        """Blocks of each decode pool: ordinary memory, taken as sequences come."""
        if self.settings.kv_blocks or not workers:
            return self.settings.kv_blocks or 0
        share = self.host.memory // 4 // workers
        most = self.settings.running * self.context_blocks
        return max(self.context_blocks, min(share // self.block_bytes, most))

    def prefill(self, workers: int) -> int:
        """Blocks of each prefill pool: a file in /dev/shm, allocated whole at the start."""
        if self.settings.prefill_kv_blocks or not workers:
            return self.settings.prefill_kv_blocks or 0
        share = min(self.host.shm_free // 2, self.host.memory // 16) // workers
        most = PREFILL_CONTEXTS * self.context_blocks
        return max(self.context_blocks, min(share // self.block_bytes, most))

    def check(self, prefill: int, others: int) -> None:
        """Raise BadUsage or TooSmall where the model or the pools cannot hold a full context, or what was asked for."""
        if self.context > self.model_context:
            raise BadUsage(f"--max-model-len must be at most the model's {self.model_context}, not {self.context}")
        asked = (self.settings.prefill_kv_blocks or 0) * self.block_bytes * prefill
        if asked > self.host.shm_free:
            raise TooSmall(
                f"--prefill-kv-blocks {self.settings.prefill_kv_blocks} needs {size(asked)} of {SHM} for {prefill}"
                f" prefill worker(s), and {size(self.host.shm_free)} are free (containers: --shm-size)",
                str(SHM),
            )
        in_shm = 0 if self.settings.prefill_kv_blocks else prefill
        in_memory = in_shm + (0 if self.settings.kv_blocks else others)
        # A part is left: the model wants memory, the pool's file has a header, and others use /dev/shm too.
        self._need(in_shm, self.host.shm_free * 9 // 10, str(SHM), " (containers: --shm-size)")
        self._need(in_memory, self.host.memory_free * 8 // 10, "memory", "")

    def _need(self, contexts: int, there: int, where: str, hint: str) -> None:
        wanted = contexts * self.context_blocks * self.block_bytes
        if wanted > there:
            fits = there // contexts // self.block_bytes * self.settings.block_size
            raise TooSmall(
                f"{contexts} full context(s) of {self.context} tokens need {size(wanted)} of {where}, and {size(there)}"
                f" can be used{hint}; --max-model-len {fits} fits, or set --kv-blocks and --prefill-kv-blocks",
                where,
            )
