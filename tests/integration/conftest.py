"""Fixtures of the tests that need a real server; what they hold is in tests/bed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from prelay_queue.settings import QueueSettings
from tests.bed.processes import Api, Fleet, fleet
from tests.bed.scripted import ScriptedWorker
from tests.bed.servers import Server, any_server, own_server, shared_server
from tests.bed.tokenizer import make_tokenizer

__all__ = ["any_server", "own_server", "shared_server"]


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
