"""Which CPUs are taken to multiply bfloat16."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from prelay_engine.cpu import Cpu, multiplies_bfloat16, this_cpu

AVX512 = "avx2 avx512f avx512bw avx512vl avx512dq"


@pytest.mark.parametrize(("flags", "native"), [
    ("", False),
    ("sse2 avx avx2 fma f16c", False),
    (AVX512, False),
    (f"{AVX512} avx512_vnni", False),
    (f"{AVX512} avx512_bf16", True),
    (f"{AVX512} amx_tile amx_bf16", True),
    ("avx2 avx512f avx512_bf16", False),
    ("avx2 amx_bf16", False),
    ("fp asimd sve i8mm bf16", True),
    ("fp asimd sve i8mm", False),
])  # fmt: skip
def test_bfloat16_is_native_where_the_cpu_has_its_products(flags: str, native: bool) -> None:
    assert multiplies_bfloat16(frozenset(flags.split())) is native


@pytest.mark.parametrize(("text", "cpu"), [
    ("processor\t: 0\nvendor_id\t: GenuineIntel\nflags\t\t: avx amx_bf16\n\nprocessor\t: 1\nflags\t\t: other\n",
     Cpu("GenuineIntel", frozenset({"avx", "amx_bf16"}))),
    ("processor\t: 0\nFeatures\t: fp bf16\nCPU part\t: 0xd40\n\n", Cpu("", frozenset({"fp", "bf16"}))),
    ("bugs\t: bf16\n", Cpu()),
    ("", Cpu()),
])  # fmt: skip
def test_features_are_those_of_the_first_core_and_of_no_other_line(tmp_path: Path, text: str, cpu: Cpu) -> None:
    file = tmp_path / "cpuinfo"
    file.write_text(text)
    assert this_cpu(file) == cpu


def test_a_machine_that_hides_its_cpu_is_one_without_features(tmp_path: Path) -> None:
    assert this_cpu(tmp_path / "none") == Cpu()


def test_the_engine_and_the_command_ask_the_same_function_and_it_needs_no_torch() -> None:
    code = "import sys, prelay.host; print(prelay.host.this_host().has_bf16, 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == f"{multiplies_bfloat16(this_cpu().flags)} False\n"
