"""A process that owns a KV pool, for test_kv_processes.py: `kv_exporter.py <folder> <owner>`.

It fills the pool with random bytes and writes one JSON line: the reference to all blocks, and a SHA-256 of each block.
Then it answers one line to each line it reads:
    refill   raises every generation, writes new bytes over every block, and writes such a line again
    raise    raises every generation only
    close    gives the pool up and ends
"""

from __future__ import annotations

import hashlib
import os
import sys
from pathlib import Path

import orjson
import torch

from prelay_kv.layout import KvLayout
from prelay_kv.shm import ShmPool

LAYOUT = KvLayout(
    num_blocks=64,
    layers=4,
    kv_heads=2,
    block_size=16,
    head_dim=64,
    dtype="bfloat16",
    layout_hash="1a2b",
    numerics_hash="3c4d",
)


def fill(pool: ShmPool) -> dict[str, object]:
    noise = [os.urandom(LAYOUT.block_nbytes) for _ in range(LAYOUT.num_blocks)]
    for block, data in enumerate(noise):
        pool.tensor[block].view(torch.uint8).copy_(
            torch.frombuffer(bytearray(data), dtype=torch.uint8).view(4, 2, 2, 16, 128)
        )
    ref = pool.ref(range(LAYOUT.num_blocks), pool.generations, LAYOUT.num_blocks * LAYOUT.block_size)
    return {"ref": ref.encode().decode(), "digests": [hashlib.sha256(data).hexdigest() for data in noise]}


def answer(pool: ShmPool, command: str) -> object:
    if command == "refill":
        pool.generations[:] += 1
        return fill(pool)
    if command == "raise":
        pool.generations[:] += 1
        return "raised"
    pool.close()
    return "closed"


def main() -> None:
    torch.set_num_threads(1)
    pool = ShmPool.create(sys.argv[2], LAYOUT, Path(sys.argv[1]))
    replies = sys.stdout.buffer
    replies.write(orjson.dumps(fill(pool)) + b"\n")
    replies.flush()
    for line in sys.stdin:
        reply = answer(pool, line.strip())
        replies.write(orjson.dumps(reply) + b"\n")
        replies.flush()
        if reply == "closed":
            return


if __name__ == "__main__":
    main()
