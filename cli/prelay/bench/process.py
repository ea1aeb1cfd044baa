"""Child processes of a measurement."""

from __future__ import annotations

import os

from ..options import OPTIONS


def environment(threads: int = 1) -> dict[str, str]:
    """Ours without settings of whoever measures, and with a fixed number of threads."""
    from ..roles import thread_variables

    settings = {option.variable for option in OPTIONS.values()} | {"PRELAY_CONFIG"}
    return {name: value for name, value in os.environ.items() if name not in settings} | thread_variables(threads)
