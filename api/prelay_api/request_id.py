"""The names of requests: unique, and each tells when it was given, so that one which is gone is known to have been."""

from __future__ import annotations

import re
import secrets
import time

#: By so much may the clocks of two hosts differ, seconds.
SKEW_S = 300

_NAME = re.compile(r"(?:chat)?cmpl-([0-9a-f]{8})[0-9a-f]{16}")


def new_id(kind: str) -> str:
    """A name that nobody else gives. `kind` is chatcmpl or cmpl."""
    return f"{kind}-{int(time.time()):08x}{secrets.token_hex(8)}"


def was_given(request_id: str) -> bool:
    """Whether it looks like a name that was given before now: a guess is next to impossible by accident."""
    found = _NAME.fullmatch(request_id)
    return found is not None and int(found[1], 16) <= time.time() + SKEW_S
