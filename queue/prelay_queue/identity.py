"""Who a process of the fleet is: an incarnation, new at every start. Pids mean nothing across containers; this does."""

from __future__ import annotations

import os
import re
import secrets
import socket


def incarnation() -> str:
    """Return host:pid:random, free of the characters that separate fields in Redis."""
    return f"{process_prefix(os.getpid())}{secrets.token_hex(4)}"


def process_prefix(pid: int) -> str:
    """Return what the incarnation of process `pid` of this host begins with."""
    host = re.sub(r"[^A-Za-z0-9.-]", "-", socket.gethostname())
    return f"{host}:{pid}:"
