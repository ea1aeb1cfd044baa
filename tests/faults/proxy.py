"""A proxy before a server's socket that cuts connections between a request and its reply."""

from __future__ import annotations

import contextlib
import random
import socket
import threading
from pathlib import Path


class CuttingProxy:
    """Forwards a unix socket. Of the replies, the share `cut` is thrown away and the connection closed instead."""

    def __init__(self, target: Path, listen: Path, cut: float, seed: int = 7) -> None:
        self.url = f"unix://{listen}"
        self.cut = cut
        self.cuts = 0
        self._target = target
        self._chance = random.Random(seed)
        self._open: set[socket.socket] = set()
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(listen))
        self._listener.listen(64)
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # closed
            while True:
                client, _ = self._listener.accept()
                server = socket.socket(socket.AF_UNIX)
                server.connect(str(self._target))
                self._open |= {client, server}
                for source, sink, replies in ((client, server, False), (server, client, True)):
                    thread = threading.Thread(target=self._pump, args=(source, sink, replies), daemon=True)
                    self._threads.append(thread)
                    thread.start()

    def _pump(self, source: socket.socket, sink: socket.socket, replies: bool) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                if replies and self._chance.random() < self.cut:
                    self.cuts += 1
                    break
                sink.sendall(data)
        for end in (source, sink):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.cut = 0
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for end in self._open:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(5)
        for end in self._open:
            end.close()
