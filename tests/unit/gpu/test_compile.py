"""The attention kernels compile for Hopper without a card: what the interpreter accepts the compiler may not."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

CASES: list[dict[str, Any]] = [
    {"dtype": "bfloat16", "dim": 128, "group": 4},
    {"dtype": "bfloat16", "dim": 256, "group": 2, "windowed": True, "softcap": 50.0, "sinks": True},
    {"dtype": "float16", "dim": 80, "group": 3, "block_size": 1},
    {"dtype": "float32", "dim": 128, "group": 1},
]

#: Bytes of shared memory that a program may have on every card since compute capability 8.0.
SHARED = 99 * 1024


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> list[list[dict[str, Any]]]:
    """What comes of the kernels of each case."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    environment["TRITON_CACHE_DIR"] = str(tmp_path_factory.mktemp("triton"))
    program = [sys.executable, str(Path(__file__).with_name("compiled.py")), json.dumps(CASES)]
    done = subprocess.run(program, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_all_kernels_compile_within_a_programs_memory_and_registers(compiled: list[list[dict[str, Any]]]) -> None:
    assert len(compiled) == len(CASES)
    for case, kernels in zip(CASES, compiled, strict=True):
        for kernel in kernels:
            assert kernel["shared"] <= SHARED, (case, kernel)
            assert kernel["spilled"] == 0, (case, kernel)


def test_layers_rows_tables_and_windows_need_no_compiling_again(compiled: list[list[dict[str, Any]]]) -> None:
    for case, kernels in zip(CASES, compiled, strict=True):
        shapes = 1 if case["dtype"] == "float32" or case["dim"] > 128 else 2  # exact, and not
        counts = Counter(kernel["kernel"] for kernel in kernels)
        assert counts == {"_attend": shapes, "_decode": 1, "_combine": 1, "_write_kv": 1}, case


def test_halves_go_through_tensor_cores_and_come_sixteen_bytes_at_a_time(
    compiled: list[list[dict[str, Any]]],
) -> None:
    for case, kernels in zip(CASES, compiled, strict=True):
        for kernel in kernels:
            if kernel["kernel"] in ("_attend", "_decode") and case["dtype"] != "float32":
                assert kernel["tensor_cores"], (case, kernel)
                assert kernel["copies_of_16_bytes"] > 0, (case, kernel)
