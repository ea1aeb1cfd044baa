"""Processes that own KV pools, for test_kv_processes.py: `kv_exporter.py <fd>`, where a socket says what to do.

Importing torch takes seconds, so exporters are forks of one process. To `start <folder> <owner>` with two descriptors,
the input and the output of a new exporter, it answers a pid; to `end <pid>`, how that one ended.

An exporter fills its pool with random bytes and writes one JSON line: the reference to all blocks, and a SHA-256 of
each block. Then it answers one line to each line it reads:
    refill   raises every generation, writes new bytes over every block, and writes such a line again
    raise    raises every generation only
    close    gives the pool up and ends
"""

from __future__ import annotations

import hashlib
import os
import socket
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


def export(folder: str, owner: str) -> None:
    pool = ShmPool.create(owner, LAYOUT, Path(folder))
    replies = sys.stdout.buffer
    replies.write(orjson.dumps(fill(pool)) + b"\n")
    replies.flush()
    for line in sys.stdin:
        reply = answer(pool, line.strip())
        replies.write(orjson.dumps(reply) + b"\n")
        replies.flush()
        if reply == "closed":
            return


def fork(link: socket.socket, folder: str, owner: str, given: list[int]) -> int:
    if pid := os.fork():
        for fd in given:
            os.close(fd)
        return pid
    code = 1
    try:
        link.close()
        for fd, place in zip(given, (0, 1), strict=True):
            os.dup2(fd, place)
            os.close(fd)
        export(folder, owner)
        code = 0
    finally:
        os._exit(code)


def main() -> None:
    torch.set_num_threads(1)
    with socket.socket(fileno=int(sys.argv[1])) as link:
        while True:
            data, given, _, _ = socket.recv_fds(link, 4096, 2)
            if not data:
                return
            what, *rest = data.decode().split("\n")
            if what == "start":
                link.send(b"%d" % fork(link, rest[0], rest[1], given))
            else:
                link.send(b"%d" % os.waitstatus_to_exitcode(os.waitpid(int(rest[0]), 0)[1]))


if __name__ == "__main__":
    main()
