"""Fake GPUs of the test's own, and the proof that nothing is left on them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from prelay_kv.cuda.runtime import Cudart
from tests.bed.cudart import FakeGpus, fake_gpus


@pytest.fixture
def gpus(tmp_path: Path) -> Iterator[FakeGpus]:
    folder = tmp_path / "gpus"
    folder.mkdir()
    with fake_gpus(folder) as found:
        yield found


@pytest.fixture
def runtime(gpus: FakeGpus) -> Cudart:
    return gpus.runtime
