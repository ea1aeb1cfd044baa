"""Single keys from a terminal, which is as it was afterwards, however the program ends."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import termios
import time
import tty
from collections.abc import Iterator
from types import FrameType


class Keys:
    """Waits for a key. Where there is no terminal none comes."""

    def __init__(self, descriptor: int | None) -> None:
        self._descriptor = descriptor

    def wait(self, seconds: float) -> str:
        """Return the key that was pressed within so many seconds, or ''."""
        if self._descriptor is None:
            time.sleep(seconds)
            return ""
        ready, _, _ = select.select([self._descriptor], [], [], seconds)
        if not ready:
            return ""
        pressed = os.read(self._descriptor, 64).decode(errors="ignore")
        return pressed or "q"  # the end of the input


@contextlib.contextmanager
def single_keys() -> Iterator[Keys]:
    """Read keys without Enter, and unseen. SIGTERM and SIGHUP end the block as Ctrl-C does."""
    before = [signal.signal(number, _interrupt) for number in (signal.SIGTERM, signal.SIGHUP)]
    try:
        with _raw(sys.stdin.fileno() if sys.stdin.isatty() else None) as descriptor:
            yield Keys(descriptor)
    finally:
        for number, handler in zip((signal.SIGTERM, signal.SIGHUP), before, strict=True):
            signal.signal(number, handler)


@contextlib.contextmanager
def _raw(descriptor: int | None) -> Iterator[int | None]:
    if descriptor is None:
        yield None
        return
    before = termios.tcgetattr(descriptor)
    try:
        tty.setcbreak(descriptor)
        yield descriptor
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)


def _interrupt(_: int, __: FrameType | None) -> None:
    raise KeyboardInterrupt
