"""Fixtures of the tests that need a real server; what they hold is in tests/bed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from prelay_queue.settings import QueueSettings
from tests.bed.processes import Api, Fleet, fleet
from tests.bed.scripted import ScriptedWorker
from tests.bed.servers import KINDS, Server, any_server, own_server, running, shared_server
from tests.bed.tokenizer import make_tokenizer
from tests.integration.queue_backend import Backend, DoubleBackend, ServerBackend
from tests.integration.queue_desk import Desk, ServerDesk

__all__ = ["any_server", "own_server", "shared_server"]


@pytest.fixture(scope="session", params=("double", *KINDS))
def new_backend(request: pytest.FixtureRequest) -> Iterator[Callable[[], Backend]]:
    """Makes partitions of the queue: in memory, on Redis and on Valkey. What they share may be full, not killed."""
    if request.param == "double":
        yield DoubleBackend
    else:
        for server in running(request.param):
            yield partial(_on_server, server)


def _on_server(server: Server) -> Backend:
    return ServerBackend(server.settings())


@pytest.fixture
def desk(new_backend: Callable[[], Backend]) -> Iterator[Desk]:
    """A desk of the test's own: what is asked here is the contract, and holds everywhere."""
    desk = Desk(new_backend())
    yield desk
    desk.close()


@pytest.fixture
def server_desk(any_server: Server) -> Iterator[ServerDesk]:
    """A desk for what only a server has: scripts to flush, commands on the wire."""
    desk = ServerDesk(any_server.settings())
    yield desk
    desk.close()


@pytest.fixture(scope="session")
def null_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder whose text shows its token ids."""
    return make_tokenizer(tmp_path_factory.mktemp("null"))


@pytest.fixture(scope="session")
def quiet_queue(shared_server: Server) -> QueueSettings:
    """The queue of `quiet_api`."""
    return shared_server.settings()


@pytest.fixture(scope="session")
def quiet_api(quiet_queue: QueueSettings, null_folder: Path) -> Iterator[Api]:
    """An API process without workers, shared: for requests that a test answers itself, or that never get far."""
    with fleet(quiet_queue, null_folder) as found:
        yield found.api(keep_alive_s=0.3)


@pytest.fixture
def scripted(quiet_queue: QueueSettings) -> Iterator[ScriptedWorker]:
    """A worker for `quiet_api` in the hands of the test."""
    worker = ScriptedWorker(quiet_queue)
    yield worker
    worker.close()


@pytest.fixture
def new_fleet(shared_server: Server, null_folder: Path) -> Iterator[Fleet]:
    """A fleet of the test's own on the shared server."""
    with fleet(shared_server.settings(), null_folder) as found:
        yield found
