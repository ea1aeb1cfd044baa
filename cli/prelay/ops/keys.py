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

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Keys:
    """Waits for a key. Where there is no terminal none comes."""

    def __init__(self, descriptor: int | None) -> None:
        self.descriptor = descriptor
        self._interrupted = False

    def interrupt(self, _: int, __: FrameType | None) -> None:
        """Handle a signal: raise KeyboardInterrupt, and remember it, since a destructor may have swallowed that."""
        self._interrupted = True
        raise KeyboardInterrupt

    def wait(self, seconds: float) -> str:
        """Return the key that was pressed within so many seconds, or ''. Raise KeyboardInterrupt."""
        if self._interrupted:
            raise KeyboardInterrupt
        if self.descriptor is None:
            time.sleep(seconds)
            return ""
        ready, _, _ = select.select([self.descriptor], [], [], seconds)
        if not ready:
            return ""
        pressed = os.read(self.descriptor, 64).decode(errors="ignore")
        return pressed or "q"  # the end of the input


@contextlib.contextmanager
def single_keys() -> Iterator[Keys]:
    """Read keys without Enter, and unseen. SIGTERM and SIGHUP end the block as Ctrl-C does."""
    keys = Keys(sys.stdin.fileno() if sys.stdin.isatty() else None)
    before = [signal.signal(number, keys.interrupt) for number in _SIGNALS]
    try:
        with _raw(keys.descriptor):
            yield keys
    finally:
        for number, handler in zip(_SIGNALS, before, strict=True):
            signal.signal(number, handler)


@contextlib.contextmanager
def _raw(descriptor: int | None) -> Iterator[None]:
    if descriptor is None:
        yield
        return
    before = termios.tcgetattr(descriptor)
    try:
        tty.setcbreak(descriptor)
        yield
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)
