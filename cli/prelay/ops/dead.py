"""`prelay dead`: jobs that were given up for their crashes."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table

from ..errors import BadUsage
from .jobs import for_each, print_json
from .screen import screen
from .server import AdminServer
from .words import clock, plural

#: As many as one listing has.
MOST = 1000


def show_letters(server: AdminServer, limit: int, *, json: bool) -> int:
    """Print the newest dead letters."""
    found = server.dead(limit)
    if json:
        print_json(found)
        return 0
    console, table = screen(), Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("letter", no_wrap=True)
    table.add_column("time", no_wrap=True)
    table.add_column("job", overflow="fold")
    table.add_column("why", overflow="fold")
    table.add_column("retry", no_wrap=True)
    for letter in found["dead"]:
        row = letter["id"], clock(letter["ms"]), letter["job"], letter["why"]
        table.add_row(*row, "yes" if letter["retry"] else "no")
    if found["dead"]:
        console.print(table)
    console.print(plural(found["count"], "dead letter"), style="dim")
    return 0


def chosen(server: AdminServer, letters: Sequence[str], *, everything: bool) -> list[str]:
    """The letters that are named, or all. Raise BadUsage for neither and for both."""
    if everything == bool(letters):
        raise BadUsage("name dead letters, as `prelay dead ls` shows them, or give --all")
    return [letter["id"] for letter in server.dead(MOST)["dead"]] if everything else list(letters)


def retry(server: AdminServer, letters: Sequence[str]) -> int:
    """Submit the jobs anew."""

    def one(letter: str) -> str:
        request_id = server.retry(letter)["request"]
        return f"runs as {request_id}; read it at {server.url}/v1/streams/{request_id}"

    return for_each(letters, one)


def drop(server: AdminServer, letters: Sequence[str]) -> int:
    """Forget them."""

    def one(letter: str) -> str:
        server.drop(letter)
        return "dropped"

    return for_each(letters, one)
