from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from prelay_engine.config import EngineConfig
from prelay_engine.errors import ConfigError


def test_the_defaults_are_valid() -> None:
    assert EngineConfig(model=Path("m")).block_size == 16


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("dtype", "float16"),
        ("block_size", 0),
        ("block_size", 24),
        ("block_size", 128),
        ("num_blocks", 0),
        ("max_running", 0),
        ("prefill_chunk", 0),
        ("max_model_len", 1),
        ("threads", 0),
        ("kernels", "cuda"),
        ("quantization", "int4"),
    ],
)
def test_a_value_out_of_range_is_refused_by_name_with_the_limit_and_the_value(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=rf"^{name} must be .+, not {value!r}$"):
        EngineConfig(model=Path("m"), **{name: value})
