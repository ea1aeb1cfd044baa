"""What tests of every kind share."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from prelay_engine.demo import default_cache, fetch_demo
from prelay_engine.errors import DemoError


@pytest.fixture(scope="session")
def demo_model() -> Path:
    """Folder of the demo model: $PRELAY_TEST_MODEL, or the cache, filled if need be. Without it skip; in CI fail."""
    if given := os.environ.get("PRELAY_TEST_MODEL"):
        return Path(given)
    try:
        return fetch_demo(default_cache(), lambda _what, _share: None)
    except DemoError as error:
        if os.environ.get("CI"):
            pytest.fail(str(error))
        pytest.skip(str(error))
