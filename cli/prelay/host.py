"""What this machine has: memory, /dev/shm, cores. Container limits count."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from pathlib import Path

from prelay_engine.cpu import multiplies_bfloat16, this_cpu
from prelay_engine.native.build import expected

from .errors import PortTaken

SHM = Path("/dev/shm")  # noqa: S108 - where KV segments lie, not a temporary file
_CGROUP_LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))


@dataclass(frozen=True, slots=True)
class Host:
    """Bytes and cores that this process may use."""

    memory: int
    memory_free: int
    shm_free: int
    cores: int
    has_bf16: bool
    has_kernels: bool = True  # native ones, of the engine


def this_host() -> Host:
    total, free = _memory()
    return Host(
        total, free, shm_free(), len(os.sched_getaffinity(0)), multiplies_bfloat16(this_cpu().flags), expected()
    )


def shm_free(folder: Path = SHM) -> int:
    """Return the free bytes of /dev/shm, 0 when there is none."""
    return space(folder)[1]


def space(folder: Path) -> tuple[int, int]:
    """Return all and the free bytes of the file system of a folder, zeros when it is not there."""
    try:
        stat = os.statvfs(folder)
    except OSError:
        return 0, 0
    return stat.f_blocks * stat.f_frsize, stat.f_bavail * stat.f_frsize


def _memory() -> tuple[int, int]:
    fields = {}
    for line in Path("/proc/meminfo").read_text().splitlines():
        name, _, rest = line.partition(":")
        fields[name] = int(rest.split()[0]) * 1024
    total = min(fields["MemTotal"], *_cgroup_limits()) if _cgroup_limits() else fields["MemTotal"]
    return total, min(fields["MemAvailable"], total)


def _cgroup_limits() -> list[int]:
    found = []
    for path in _CGROUP_LIMITS:
        try:
            words = path.read_text().strip()
        except OSError:
            continue
        if words.isdigit():  # "max" is no limit
            found.append(int(words))
    return found


def size(count: int) -> str:
    """Return a number of bytes as people write it."""
    value = float(count)
    for unit in ("B", "KiB", "MiB"):
        if value < 1024:
            return f"{value:.0f} {unit}"
        value /= 1024
    return f"{value:.1f} GiB"


def check_port(host: str, port: int) -> None:
    """Raise PortTaken when nothing could listen there now."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except socket.gaierror as error:
        raise PortTaken(f"--host {host}: not an address of this machine ({error.strerror})") from None
    family, kind, proto, _, address = found[0]
    with socket.socket(family, kind, proto) as probe:
        # As the API will: a port in TIME_WAIT is free, one that is listened on is not.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(address)
        except OSError as error:
            raise PortTaken(f"cannot listen on {host} port {port}: {error.strerror} (another --port?)") from None
