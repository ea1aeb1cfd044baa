"""Connections to the server under a name, so that those of one process can be counted among all others.

By the process's own sockets they cannot: a pair that an event loop talks to itself with looks the same.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace

from prelay_queue.settings import QueueSettings

from .processes import again_and_again
from .servers import Server


def named(settings: QueueSettings, name: str) -> QueueSettings:
    """The same settings for a process whose connections have a name."""
    return replace(settings, url=f"{settings.url}?client_name={name}")


def lines(server: Server, name: str) -> int:
    """How many connections of this name the server has now."""
    return sum(each["name"] == name for each in server.client.client_list())


class Most:
    """The most connections of a name that were ever seen. `seen` grows while they are watched."""

    def __init__(self, server: Server, name: str) -> None:
        self.seen = 0
        self._server = server
        self._name = name

    def look(self) -> None:
        self.seen = max(self.seen, lines(self._server, self._name))


@contextlib.contextmanager
def watched(server: Server, name: str, every_s: float = 0.1) -> Iterator[Most]:
    """Count again and again."""
    most = Most(server, name)
    with again_and_again(every_s, most.look):
        yield most
    most.look()
