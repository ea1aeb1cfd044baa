"""A job that is cut anywhere, any number of times, is its undisturbed run, bit for bit and letter for letter."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest

from prelay_engine import loading
from prelay_engine.config import EngineConfig
from prelay_engine.model import Model
from prelay_text.tokenizer import Tokenizer
from tests.bed.cuts import check_jobs
from tests.bed.tiny import make_tiny_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny"))


@cache
def loaded(folder: Path, dtype: str, how: str) -> Model:
    kind = {"quantization": "w8a8"} if how == "w8a8" else {"kernels": how}
    return loading.load(EngineConfig(model=folder, dtype=dtype, **kind))  # type: ignore[arg-type]


@pytest.mark.parametrize("count", [10, pytest.param(25, marks=pytest.mark.slow)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("greedy", [True, False], ids=["greedy", "seeded"])
@pytest.mark.parametrize("how", ["native", "w8a8", pytest.param("torch", marks=pytest.mark.slow)])
def test_a_job_cut_anywhere_is_its_undisturbed_run(
    folder: Path, dtype: str, greedy: bool, count: int, how: str
) -> None:
    """Ids, log-probabilities, text and end; with stop strings, characters of two tokens, prefix hits, any chunks."""
    met = check_jobs(loaded(folder, dtype, how), Tokenizer.load(folder), seed=5, count=count, greedy=greedy)
    assert met["cuts"] > 30
    for what in ("inside a character", "inside a stop string", "tokens discarded", "hits", "stop", "length"):
        assert met[what] > 2, met
