"""Ports for servers of tests that run side by side."""

from __future__ import annotations

import itertools
import os
import socket

#: Below the range from which the system deals ports out. Each test process has its own.
FIRST, EACH = 20_000, 1_000
_numbers = itertools.cycle(range(EACH))


def free_port() -> int:
    """A port that nothing listens on now, and that no other test process is given meanwhile."""
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw9").removeprefix("gw"))
    for number in itertools.islice(_numbers, EACH):
        port = FIRST + worker % 10 * EACH + number
        with socket.socket() as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                sock.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise AssertionError("no port is free")
