"""A link to a server's socket that a test can make bad: replies lost, packets late, held up or swallowed."""

from __future__ import annotations

import contextlib
import random
import socket
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(slots=True)
class _Link:
    """One connection through the proxy. `lost`: something of it was swallowed, so nothing passes any more."""

    client: socket.socket
    server: socket.socket | None  # None: it was made while everything was swallowed
    lost: bool = False
    threads: list[threading.Thread] = field(default_factory=list)

    def hang_up(self) -> None:
        for end in (self.client, self.server):
            with contextlib.suppress(OSError):
                if end is not None:
                    end.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.hang_up()
        for thread in self.threads:
            thread.join(5)
        for end in (self.client, self.server):
            if end is not None:
                end.close()


class LinkProxy:
    """Forwards to a unix socket, from another one or (without `listen`) from a TCP port on the loopback.

    Each may be changed at any time:

    cut        the share of replies that are thrown away, with the connection closed instead: the request was served
    delay_s    every packet is this much later, in both directions
    swallow()  packets are dropped and nobody is told, as when a router dies: no FIN, no RST, and connections are made
               that never answer. After `heal` new connections work, and those that lost something never do
    hold()     packets wait, and all arrive after `heal`, as TCP sends again what was dropped
    """

    def __init__(self, target: Path, listen: Path | None = None, cut: float = 0, seed: int = 7) -> None:
        self.cut = cut
        self.cuts = 0
        self.delay_s = 0.0
        self.swallowed = 0  # packets
        self._swallowing = False
        self._flowing = threading.Event()
        self._flowing.set()
        self._target = target
        self._chance = random.Random(seed)
        self._links: list[_Link] = []
        self._listener = _listener(listen)
        host = self._listener.getsockname()
        self.url = f"unix://{listen}" if listen else f"redis://{host[0]}:{host[1]}/0"
        self._thread = threading.Thread(target=self._accept, daemon=True)
        self._thread.start()

    def swallow(self) -> None:
        self._swallowing = True

    def hold(self) -> None:
        self._flowing.clear()

    def heal(self) -> None:
        self._swallowing = False
        self._flowing.set()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # closed
            while True:
                client, _ = self._listener.accept()
                self._join(client)

    def _join(self, client: socket.socket) -> None:
        if client.family == socket.AF_INET:
            client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        server = None
        if not self._swallowing:
            server = socket.socket(socket.AF_UNIX)
            try:
                server.connect(str(self._target))
            except OSError:  # the server is down
                server.close()
                client.close()
                return
        link = _Link(client, server, lost=server is None)
        self._links.append(link)
        for source, sink in ((client, server), (server, client)):
            if source is not None:
                thread = threading.Thread(target=self._pump, args=(link, source, sink), daemon=True)
                link.threads.append(thread)
                thread.start()

    def _pump(self, link: _Link, source: socket.socket, sink: socket.socket | None) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                if source is link.server and self._chance.random() < self.cut:
                    self.cuts += 1
                    break
                if self.delay_s:
                    time.sleep(self.delay_s)
                self._flowing.wait()
                link.lost = link.lost or self._swallowing
                if link.lost or sink is None:
                    self.swallowed += 1
                    continue
                sink.sendall(data)
        self._flowing.wait()
        if not (link.lost or self._swallowing):  # otherwise the other side never hears of the end
            link.hang_up()

    def close(self) -> None:
        self.cut = 0
        self.heal()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join(5)
        for link in self._links:
            link.close()


def _listener(path: Path | None) -> socket.socket:
    if path is None:
        return socket.create_server(("127.0.0.1", 0), backlog=64)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(path))
    listener.listen(64)
    return listener


#: Its name where only its cuts are wanted.
CuttingProxy = LinkProxy
