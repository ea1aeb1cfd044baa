"""Figures as people read them. Pure."""

from __future__ import annotations

import time


def duration(ms: float) -> str:
    """From milliseconds: 12 ms, 3.4 s, 5 min 2 s, 3 h 4 min."""
    if ms < 1000:
        return f"{ms:.0f} ms"
    if ms < 60_000:
        return f"{ms / 1000:.1f} s"
    minutes, seconds = divmod(round(ms / 1000), 60)
    if minutes < 60:
        return f"{minutes} min {seconds} s"
    return f"{minutes // 60} h {minutes % 60} min"


def count(number: float) -> str:
    """Short: 999, 1.2k, 34k, 5.6M."""
    for limit, by, unit in ((1000, 1, ""), (1_000_000, 1e3, "k"), (1_000_000_000, 1e6, "M")):
        if round(number) < limit:
            shown = number / by
            return f"{shown:.0f}{unit}" if not unit or shown >= 10 else f"{shown:.1f}{unit}"
    return f"{number / 1e9:.1f}G"


def clock(ms: int) -> str:
    """The time of day here."""
    return time.strftime("%H:%M:%S", time.localtime(ms / 1000)) if ms else "–"


def size(bytes_: int) -> str:
    """1.5 GB."""
    amount = float(bytes_)
    for unit in ("B", "kB", "MB", "GB"):
        if amount < 1000:
            return f"{amount:.0f} {unit}" if unit == "B" or amount >= 10 else f"{amount:.1f} {unit}"
        amount /= 1000
    return f"{amount:.1f} TB"


def plural(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def listed(items: list[str]) -> str:
    """a, b and c."""
    return " and ".join([", ".join(items[:-1]), items[-1]]) if len(items) > 1 else "".join(items)
