"""Where tables go: a terminal of its own width; a pipe or a file, which has none, gets long lines."""

from __future__ import annotations

import os

from rich.console import Console

#: Columns of a pipe.
PIPE_COLUMNS = 160


def screen() -> Console:
    console = Console(highlight=False)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = PIPE_COLUMNS
    return console
