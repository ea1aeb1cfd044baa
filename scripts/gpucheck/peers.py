"""Peers, as a check has them."""

from __future__ import annotations

import os
import time
from typing import Any

from .folders import command
from .found import Wrong
from .lines import Asked, Silent

_ANSWER_S, _START_S = 60.0, 120.0


class Partner:
    """Another process of `peer.py`. It starts at once; the first `ask` waits until it is up."""

    def __init__(self, rehearse: bool, kind: str = "memory", **environment: str) -> None:
        more = ["--rehearse"] if rehearse else []
        self._asked = Asked(command("--peer", kind, *more), {**os.environ, **environment})
        self._up = False

    def ask(self, *message: Any, within_s: float = _ANSWER_S) -> Any:
        """Wrong where it fails, says nothing, or has ended."""
        self.wait()
        try:
            self._asked.tell(message)
            said = self._asked.hear(time.monotonic() + within_s)
        except Silent as error:
            raise Wrong(f"the other process, asked to {message[0]}: {error}") from None
        if "error" in said:
            raise Wrong(f"the other process, asked to {message[0]}: {said['error']}: {said['text']}")
        return said["ok"]

    def wait(self) -> None:
        """Until it is up."""
        if not self._up:
            try:
                self._asked.hear(time.monotonic() + _START_S)
            except Silent as error:
                raise Wrong(f"the other process did not start: {error}") from None
            self._up = True

    def kill(self) -> None:
        """SIGKILL; it is gone when this returns."""
        self._asked.kill()

    def end(self) -> None:
        self._asked.close()
