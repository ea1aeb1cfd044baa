"""Who a worker is: an incarnation, new at every start. Pids mean nothing across containers; this does."""

from __future__ import annotations

import os
import re
import secrets
import socket


def incarnation() -> str:
    """Return host:pid:random, free of the characters that separate fields in Redis."""
    host = re.sub(r"[^A-Za-z0-9.-]", "-", socket.gethostname())
    return f"{host}:{os.getpid()}:{secrets.token_hex(4)}"
