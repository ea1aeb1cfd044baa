"""How many blocks and threads each worker gets when nobody says. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from .errors import TooSmall
from .geometry import Geometry
from .host import SHM, Host, size
from .settings import Settings

#: Full contexts that a prefill pool holds when there is room: finished prompts wait in it for a decode worker.
PREFILL_CONTEXTS = 2
#: Blocks of a worker with the null model, whose KV is a few bytes.
NULL_BLOCKS = 4096


@dataclass(frozen=True, slots=True)
class Sizes:
    """Per worker: blocks of a decode or unified pool, blocks of a prefill pool, threads."""

    kv_blocks: int
    prefill_kv_blocks: int
    threads: int


def sizes(settings: Settings, geometry: Geometry | None, host: Host) -> Sizes:
    """Decide for one host that runs the workers `settings` counts. No geometry is the null model.

    Raise TooSmall, naming the size needed, when the memory cannot hold one full context per worker.
    """
    prefill, decode, unified = settings.counts()
    threads = settings.threads or max(1, host.cores // max(1, prefill + decode + unified))
    if geometry is None:
        return Sizes(settings.kv_blocks or NULL_BLOCKS, settings.prefill_kv_blocks or NULL_BLOCKS, threads)
    pool = _Pool(settings, geometry, host)
    return Sizes(
        kv_blocks=pool.decode(decode + unified) if decode + unified else 0,
        prefill_kv_blocks=pool.prefill(prefill) if prefill else 0,
        threads=threads,
    )


class _Pool:
    def __init__(self, settings: Settings, geometry: Geometry, host: Host) -> None:
        self.settings, self.host = settings, host
        element = 2 if settings.dtype == "bfloat16" or (settings.dtype == "auto" and host.has_bf16) else 4
        self.block_bytes = geometry.token_bytes(element) * settings.block_size
        self.context = min(settings.max_model_len or geometry.context_len, geometry.context_len)
        self.context_blocks = -(-self.context // settings.block_size)

    def decode(self, workers: int) -> int:
        """Blocks of each decode pool: ordinary memory, taken as sequences come."""
        if self.settings.kv_blocks:
            return self.settings.kv_blocks
        share = self.host.memory // 4 // workers
        most = self.settings.max_running * self.context_blocks
        blocks = min(share // self.block_bytes, most)
        if blocks >= self.context_blocks:
            return blocks
        self._need("memory", self.host.memory_free // 2 // workers, "--kv-blocks", workers)
        return self.context_blocks

    def prefill(self, workers: int) -> int:
        """Blocks of each prefill pool: a file in /dev/shm, allocated whole at the start."""
        free = self.host.shm_free // workers
        if self.settings.prefill_kv_blocks:
            self._fits(self.settings.prefill_kv_blocks, free, workers)
            return self.settings.prefill_kv_blocks
        share = min(free // 2, self.host.memory // 16 // workers)
        blocks = min(share // self.block_bytes, PREFILL_CONTEXTS * self.context_blocks)
        if blocks >= self.context_blocks:
            return blocks
        # A little is left: the pool has a header, and other programs use /dev/shm too.
        self._need(str(SHM), min(free, self.host.memory_free // 2) * 9 // 10, "--prefill-kv-blocks", workers)
        return self.context_blocks

    def _fits(self, blocks: int, free: int, workers: int) -> None:
        wanted = blocks * self.block_bytes
        if wanted > free:
            raise TooSmall(
                f"--prefill-kv-blocks {blocks} needs {size(wanted * workers)} of /dev/shm for {workers} prefill"
                f" worker(s), and {size(self.host.shm_free)} are free (containers: --shm-size)"
            )

    def _need(self, where: str, there: int, option: str, workers: int) -> None:
        wanted = self.context_blocks * self.block_bytes
        if wanted > there:
            fits = max(0, there // self.block_bytes * self.settings.block_size)
            hint = "; containers: --shm-size" if where == str(SHM) else ""
            raise TooSmall(
                f"one full context of {self.context} tokens needs {size(wanted)} of {where} for each of {workers}"
                f" worker(s), and there are {size(there)}{hint}; --max-model-len {fits} or {option} makes it fit"
            )
