"""Servers that run the demo model, started as a user starts them; one for each way of running, shared by its tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.bed.serving import Serving, serving


@pytest.fixture(scope="session")
def plain(demo_model: Path) -> Iterator[Serving]:
    """`prelay serve` with its defaults."""
    with serving("--served-model-name", "demo", model=demo_model) as server:
        yield server


@pytest.fixture(scope="session")
def tight(demo_model: Path) -> Iterator[Serving]:
    """A decode pool far too small for eight chats at once, in bf16."""
    arguments = ("--kv-blocks", "16", "--dtype", "bfloat16", "--max-model-len", "256")
    with serving("--served-model-name", "demo", *arguments, model=demo_model) as server:
        yield server
