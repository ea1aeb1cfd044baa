"""No setting of the person who runs the tests reaches them; a supervisor that must leave no process."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator

import psutil
import pytest

from prelay.supervisor import Supervisor
from tests.unit.cli.supervised import Lines


@pytest.fixture(autouse=True)
def _no_settings_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith("PRELAY_") and not name.startswith("PRELAY_TEST_"):
            monkeypatch.delenv(name)


@pytest.fixture
def lines() -> Lines:
    return Lines()


@pytest.fixture
async def supervisor(lines: Lines) -> AsyncIterator[Supervisor]:
    before = set(psutil.Process().children(recursive=True))
    found = Supervisor(lines)
    yield found
    found.hurry.set()
    await found.stop(list(found.keepers))
    found.close()
    assert set(psutil.Process().children(recursive=True)) <= before
