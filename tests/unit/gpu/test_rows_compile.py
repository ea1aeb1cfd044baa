"""The kernels of rows compile for Hopper without a card, fit a multiprocessor and keep to its registers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

Launch = dict[str, Any]


@pytest.fixture(scope="module")
def launches(tmp_path_factory: pytest.TempPathFactory) -> list[Launch]:
    """What each launch would take of an H200, in the order of compile_rows.main."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path_factory.mktemp("triton"))
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    program = Path(__file__).with_name("compile_rows.py")
    done = subprocess.run([sys.executable, program], capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_every_kernel_of_rows_compiles_for_hopper(launches: list[Launch]) -> None:
    names = [launch["name"] for launch in launches]
    assert names == ["_linear"] * 3 + ["_rms_norm"] * 3 + ["_gated"] * 3 + ["_sample"] * 3


def test_a_program_fits_a_multiprocessor_and_keeps_what_it_works_on_in_registers(launches: list[Launch]) -> None:
    for launch in launches:
        assert launch["shared"] <= 227 * 1024
        assert launch["registers"] * launch["threads"] <= 65536
        assert launch["spilled"] <= 128, launch  # bytes a thread: a vocabulary of an odd number takes some


def test_products_of_half_precision_run_on_tensor_cores_and_load_ahead(launches: list[Launch]) -> None:
    assert [launch["wgmma"] for launch in launches[:3]] == [True, True, False]
    assert all(launch["ahead"] for launch in launches[:3])
