"""No setting of the person who runs the tests reaches them."""

from __future__ import annotations

import os

import pytest


@pytest.fixture(autouse=True)
def _no_settings_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith("PRELAY_") and not name.startswith("PRELAY_TEST_"):
            monkeypatch.delenv(name)
