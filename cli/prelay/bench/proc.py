"""What /proc tells of a process: CPU time, memory, children."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

_TICKS = os.sysconf("SC_CLK_TCK")


def cpu_s(pid: int) -> float:
    """CPU seconds of a process so far, all threads. Raise OSError when it has ended."""
    fields = _stat(pid)
    return (int(fields[11]) + int(fields[12])) / _TICKS


def memory(pid: int | str = "self") -> dict[str, int]:
    """Resident bytes now ("rss", of which "anonymous" are its own and not pages of files) and at most ("peak")."""
    found = dict(re.findall(r"^(\w+):\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE))
    names = {"rss": "VmRSS", "anonymous": "RssAnon", "peak": "VmHWM"}
    return {name: int(found.get(field, 0)) * 1024 for name, field in names.items()}


def forget_peak() -> None:
    """Let this process's peak begin anew at what it holds now. Where the kernel does not allow it, it stays."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return


def children(pid: int) -> Iterator[tuple[int, list[str]]]:
    """The children of a process: pid and command line of each."""
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        try:
            if int(_stat(int(folder.name))[1]) == pid:
                words = (folder / "cmdline").read_bytes().split(b"\0")
                yield int(folder.name), [word.decode(errors="replace") for word in words if word]
        except OSError:
            continue  # ended meanwhile


def _stat(pid: int) -> list[str]:
    """The fields of /proc/PID/stat after the name, which may hold anything: the state is the first."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
