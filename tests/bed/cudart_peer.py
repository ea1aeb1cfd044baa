"""Processes on fake GPUs: `python -m tests.bed.cudart_peer <fd>`, where a socket says what to start.

Importing torch takes seconds, so peers are forks of one process. A peer has a socket of its own, on which it answers
one JSON line to each. It can own a pool and read others':
    export OWNER      makes a pool of random bytes; says the reference to all blocks and a SHA-256 of each
    refill            raises every generation, writes new bytes over every block, and says the same again
    raise             raises every generation only
    close             closes the pool; says how much of the device is used
    fetch REF         copies all blocks of a reference; says a SHA-256 of each
    enqueue REF       begins such a copy, never ends it, and says so
What fails says the name of its error.
"""

from __future__ import annotations

import functools
import hashlib
import os
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import orjson
import torch

from prelay_kv.cuda.copies import Copier
from prelay_kv.cuda.mapping import CudaMapping
from prelay_kv.cuda.pool import CudaPool
from prelay_kv.cuda.runtime import Cudart
from prelay_kv.errors import KvError
from prelay_kv.importer import Importer
from prelay_kv.layout import KvLayout
from prelay_kv.ref import KvRef
from prelay_kv.segment import domain

LAYOUT = KvLayout(
    num_blocks=16,
    layers=4,
    kv_heads=2,
    block_size=16,
    head_dim=64,
    dtype="bfloat16",
    layout_hash="1a2b",
    numerics_hash="3c4d",
)

BLOCKS = range(LAYOUT.num_blocks)


def importer(runtime: Cudart, shm_dir: Path) -> Importer:
    opener = functools.partial(CudaMapping.open, runtime=runtime, device=0, torch_device="cpu", shm_dir=shm_dir)
    return Importer(LAYOUT.layout_hash, LAYOUT.numerics_hash, domain(shm_dir), shm_dir, openers={"cuda_ipc": opener})


class Copied:
    """A copy function: the blocks come into memory of this process, by a stream of the device."""

    def __init__(self, runtime: Cudart) -> None:
        self.target = torch.zeros(LAYOUT.shape, dtype=torch.bfloat16)
        self._runtime = runtime

    def __call__(self, pool: torch.Tensor, blocks: Sequence[int]) -> None:
        copier = Copier(self._runtime, 0)
        try:
            copier.copy(pool.data_ptr(), blocks, self.target.data_ptr(), range(len(blocks)), LAYOUT.block_nbytes)
        finally:
            copier.close()

    def digests(self) -> list[str]:
        return digests(self.target)


def digests(tensor: torch.Tensor) -> list[str]:
    return [hashlib.sha256(bytes(block.view(torch.uint8).numpy())).hexdigest() for block in tensor]


def fill(pool: CudaPool) -> dict[str, Any]:
    noise = bytearray(os.urandom(LAYOUT.nbytes))
    pool.tensor.copy_(torch.frombuffer(noise, dtype=torch.bfloat16).view(LAYOUT.shape))
    ref = pool.ref(BLOCKS, pool.generations, LAYOUT.num_blocks * LAYOUT.block_size)
    return {"ref": ref.encode().decode(), "digests": digests(pool.tensor)}


class Worker:
    """What a peer does, by the name of its command."""

    def __init__(self, library: str, shm_dir: str) -> None:
        self._runtime = Cudart(library)
        self._shm_dir = Path(shm_dir)
        self._importer = importer(self._runtime, self._shm_dir)
        self._pools: list[CudaPool] = []

    def export(self, owner: str) -> object:
        self._pools.append(CudaPool.create(owner, LAYOUT, self._runtime, 0, self._shm_dir, torch_device="cpu"))
        return fill(self._pools[-1])

    def refill(self) -> object:
        self._pools[-1].generations[:] += 1
        return fill(self._pools[-1])

    def raise_(self) -> object:
        self._pools[-1].generations[:] += 1
        return "raised"

    def close(self) -> object:
        self._pools[-1].close()
        free, total = self._runtime.memory()
        return total - free

    def fetch(self, ref: str) -> object:
        copied = Copied(self._runtime)
        self._importer.fetch(KvRef.decode(ref.encode()), copied)
        return copied.digests()

    def enqueue(self, ref: str) -> object:
        mapping = CudaMapping.open(
            KvRef.decode(ref.encode()), runtime=self._runtime, device=0, torch_device="cpu", shm_dir=self._shm_dir
        )
        target, stream = torch.zeros(LAYOUT.shape, dtype=torch.bfloat16), self._runtime.stream_create()
        source = mapping.pool(KvRef.decode(ref.encode())).data_ptr()
        self._runtime.copy_async(target.data_ptr(), source, LAYOUT.nbytes, stream)
        return "enqueued"


def work(link: socket.socket, start: dict[str, Any]) -> None:
    os.environ.update(start["environment"])
    worker = Worker(start["library"], start["shm_dir"])
    with link, link.makefile("rwb") as lines:
        for line in lines:
            name, *arguments = orjson.loads(line)
            try:
                said: object = {"ok": getattr(worker, "raise_" if name == "raise" else name)(*arguments)}
            except KvError as error:
                said = {"error": type(error).__name__, "text": str(error)}
            lines.write(orjson.dumps(said) + b"\n")
            lines.flush()


def fork(server: socket.socket, start: dict[str, Any], fd: int) -> int:
    if pid := os.fork():
        os.close(fd)
        return pid
    code = 1
    try:
        server.close()
        work(socket.socket(fileno=fd), start)
        code = 0
    finally:
        os._exit(code)


def main() -> None:
    torch.set_num_threads(1)
    with socket.socket(fileno=int(sys.argv[1])) as server:
        while True:
            data, given, _, _ = socket.recv_fds(server, 1 << 16, 1)
            if not data:
                return
            message = orjson.loads(data)
            if given:
                server.send(b"%d" % fork(server, message, given[0]))
            else:
                server.send(b"%d" % os.waitstatus_to_exitcode(os.waitpid(message, 0)[1]))


if __name__ == "__main__":
    main()
