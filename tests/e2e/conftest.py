"""Servers that run the demo model, started as a user starts them; one for each way of running, shared by its tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.bed.serving import Serving, serving

#: Three chats of the tests fill it.
SMALL = ("--kv-blocks", "16", "--max-model-len", "256")


@pytest.fixture(autouse=True)
def nothing_is_held(request: pytest.FixtureRequest) -> Iterator[None]:
    """After each test its server's pools are whole, and Redis has no job of it that is open or stays for ever."""
    names = [name for name in ("plain", "tight", "tight_bf16") if name in request.fixturenames]
    servers: list[Serving] = [request.getfixturevalue(name) for name in names]
    yield
    for server in servers:
        server.until_drained()


@pytest.fixture(scope="session")
def plain(demo_model: Path) -> Iterator[Serving]:
    """`prelay serve` with its defaults."""
    with serving("--served-model-name", "demo", model=demo_model) as server:
        yield server


@pytest.fixture(scope="session")
def tight(demo_model: Path) -> Iterator[Serving]:
    """A decode pool far too small for eight chats at once."""
    with serving("--served-model-name", "demo", *SMALL, model=demo_model) as server:
        yield server


@pytest.fixture(scope="session")
def tight_bf16(demo_model: Path) -> Iterator[Serving]:
    """The same in bf16, which CPUs without bf16 arithmetic emulate, slowly."""
    with serving("--served-model-name", "demo", "--dtype", "bfloat16", *SMALL, model=demo_model) as server:
        yield server
