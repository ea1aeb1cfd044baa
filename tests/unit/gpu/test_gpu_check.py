"""scripts/gpu_check.py where there is no card: it says so, its rehearsals pass, and what it compares can differ."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from prelay_engine.gpu.kernels import tiles
from scripts.gpucheck import catalogue, page
from scripts.gpucheck.board import Board
from scripts.gpucheck.budget import Budget
from scripts.gpucheck.catalogue import CHECKS, PARTS, Check, Part
from scripts.gpucheck.crew import Crew
from scripts.gpucheck.found import FAILED, MISSED, PASSED, SKIPPED, Found, Wrong
from scripts.gpucheck.nearness import Worst, same
from scripts.gpucheck.pattern import fill, wrong_blocks
from scripts.gpucheck.standins import orjson as standin

ROOT = Path(__file__).parents[3]


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "scripts" / "gpu_check.py"), *arguments]
    return subprocess.run(command, env=os.environ | environment, capture_output=True, text=True, check=False)


@pytest.mark.slow
@pytest.mark.parametrize("part", ["ipc", "kernels", "model", "speed"])
def test_every_check_passes_its_rehearsal(part: str, tmp_path: Path) -> None:
    file = tmp_path / "found.json"
    done = run("--rehearse", "--only", part, "--json", str(file), "--seconds", "110")
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(file.read_text())
    assert found["rehearsed"]
    assert {name: each["result"] for name, each in found["checks"].items()} == {
        check.full_name: PASSED for check in catalogue.of(part)
    }
    assert f"{len(catalogue.of(part))} passed" in done.stdout.splitlines()[-1]


def test_without_a_card_it_says_so_in_one_line(tmp_path: Path) -> None:
    done = run("--json", str(tmp_path / "found.json"), CUDA_VISIBLE_DEVICES="")
    assert (done.returncode, done.stdout.count("\n")) == (3, 1)
    assert done.stdout.startswith("gpu_check: no card to check on: ")
    assert not list(tmp_path.iterdir())


def test_what_is_not_there_cannot_be_chosen() -> None:
    done = run("--only", "ipc,speeed")
    assert done.returncode == 2
    assert "there is no speeed" in done.stderr


def test_what_finds_no_time_is_skipped_with_a_reason(tmp_path: Path) -> None:
    file = tmp_path / "found.json"
    done = run("--rehearse", "--only", "ipc.copy", "--seconds", "5", "--json", str(file))
    assert done.returncode == 1
    skipped = json.loads(file.read_text())["checks"]["ipc.copy"]
    assert (skipped["result"], skipped["why"]) == (SKIPPED, "takes about 25 s, and 5 s are left for ipc")


# What is checked, and what is said of it


def test_every_check_of_the_catalogue_is_one_of_its_parts_and_is_listed_once() -> None:
    assert catalogue.names() == ("ipc", "kernels", "model", "speed")
    assert [check.part for check in CHECKS] == [part.name for part in PARTS for _ in catalogue.of(part.name)]
    assert len({check.full_name for check in CHECKS}) == len(CHECKS)


def test_the_page_has_the_table_that_the_program_prints() -> None:
    text = (ROOT / "docs" / "gpu.md").read_text()
    found = re.search(r"<!-- gpu-check -->\n(.*?)<!-- /gpu-check -->", text, re.DOTALL)
    assert found is not None
    figures = ROOT / "docs" / "gpu_check.json"  # of a run on a card, if there ever was one
    assert found[1] == page.table(page.load(figures))
    assert run("--list", "--json", str(figures)).stdout == found[1]


def test_figures_of_a_rehearsal_are_not_shown(tmp_path: Path) -> None:
    board = board_of(tmp_path, rehearsed=True)
    board.note(CHECKS[0], Found(PASSED, "9 GB/s"))
    assert page.load(tmp_path / "found.json") is None


def test_the_table_shows_what_a_run_left(tmp_path: Path) -> None:
    board = board_of(tmp_path, card="NVIDIA H200")
    for check, found in zip(
        CHECKS, (Found(PASSED, "a | b"), Found(MISSED, "slow", "why"), Found(FAILED, why="broken")), strict=False
    ):
        board.note(check, found)
    lines = page.table(page.load(tmp_path / "found.json")).splitlines()
    shown = [line.strip("| ").rpartition("| ")[2] for line in lines[2:6]]
    assert shown == ["a / b", "below its aim: slow", "fails: broken", page.NEVER]
    assert lines[-1] == "Figures of: card NVIDIA H200."


@pytest.mark.parametrize(("result", "code"), [(PASSED, 0), (MISSED, 1), (FAILED, 1), (SKIPPED, 1)])
def test_it_ends_well_only_if_everything_passed(result: str, code: int, tmp_path: Path) -> None:
    board = board_of(tmp_path)
    board.note(CHECKS[0], Found(PASSED))
    assert board.code(CHECKS[:2]) == 1, "of one nothing is known"
    board.note(CHECKS[1], Found(result))
    assert board.code(CHECKS[:2]) == code
    assert f"1 {result}" in board.table() or result == PASSED


def board_of(folder: Path, *, rehearsed: bool = False, **facts: Any) -> Board:
    return Board(folder / "found.json", facts, rehearsed)


def test_a_second_run_of_some_checks_keeps_the_others_results(tmp_path: Path) -> None:
    board_of(tmp_path, card="A").note(CHECKS[0], Found(PASSED))
    for card, names in (("A", [CHECKS[0].full_name, CHECKS[1].full_name]), ("B", [CHECKS[1].full_name])):
        again = Board(tmp_path / "found.json", {"card": card}, rehearsed=False, keep=True)
        again.note(CHECKS[1], Found(FAILED))
        assert list(json.loads((tmp_path / "found.json").read_text())["checks"]) == names
        assert CHECKS[0].full_name not in again.table()


# Time


def test_a_part_leaves_what_it_does_not_take_to_the_others() -> None:
    budget, first, second = Budget(ends=100.0), Part("a", 30), Part("b", 70)
    assert budget.part_ends(0.0, first, (second,)) == 30.0
    assert budget.part_ends(10.0, second, ()) == 100.0
    assert budget.part_ends(120.0, second, ()) == 120.0


def test_a_check_is_begun_only_with_time_for_it_and_ended_when_all_of_it_is_gone() -> None:
    budget, check = Budget(ends=100.0), Check("a", "b", "", takes_s=10)
    assert budget.refusal(20.0, check, part_ends=30.0) == ""
    assert budget.refusal(20.5, check, part_ends=30.0)
    assert budget.limit_s(0.0, check) == 90.0
    assert budget.limit_s(95.0, check) == 5.0


# One check's end is no other's


class Children:
    """What a crew starts instead of its children: the check x.dies ends its process, and x.hangs says nothing."""

    TEXT = """
import json, os, signal, sys, time
for line in sys.stdin:
    name = json.loads(line)
    if name == "x.dies":
        os.kill(os.getpid(), signal.SIGSEGV)
    if name == "x.hangs":
        time.sleep(60)
    if name == "x.raves":
        print("no JSON", flush=True)
    print(json.dumps({"say": "half way"}))
    found = {"result": "passed", "figure": str(os.getpid())}
    print(json.dumps({"found": found, "broken": name == "x.breaks"}), flush=True)
"""


@pytest.fixture
def checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What comes of checks of which some end their process."""
    monkeypatch.setattr("scripts.gpucheck.crew.command", lambda *_: [sys.executable, "-c", Children.TEXT])
    monkeypatch.setattr("scripts.gpucheck.budget._START_S", 0.5)
    board = board_of(tmp_path)
    checks = [Check("x", name, "", takes_s=1) for name in ("well", "dies", "hangs", "raves", "again", "breaks", "last")]
    monkeypatch.setattr("scripts.gpucheck.board.CHECKS", checks)
    crew = Crew(Part("x", 1), board, Budget(ends=float("inf")), dict(os.environ), rehearse=False)
    crew.run(checks, float("inf"))
    found: dict[str, Any] = json.loads((tmp_path / "found.json").read_text())["checks"]
    return found


def test_a_check_that_ends_its_process_or_hangs_costs_itself_alone(checked: dict[str, Any]) -> None:
    failed = {name for name, each in checked.items() if each["result"] == FAILED}
    assert failed == {"x.dies", "x.hangs", "x.raves"}
    assert {name for name in checked if name not in failed} == {"x.well", "x.again", "x.breaks", "x.last"}
    assert checked["x.dies"]["why"] == f"its process: it was ended by {signal.SIGSEGV.name}"
    assert checked["x.hangs"]["why"] == "its process: it did not answer in time"


def test_a_check_that_breaks_the_device_for_its_process_is_the_last_there(checked: dict[str, Any]) -> None:
    assert checked["x.again"]["figure"] == checked["x.breaks"]["figure"] != checked["x.last"]["figure"]
    assert threading.active_count() < 20


# What is compared can differ


def test_a_block_that_differs_in_one_word_is_seen() -> None:
    pool = torch.zeros(6, 2, 2, 1, 4, 8, dtype=torch.bfloat16)
    fill(pool, seed=3)
    assert wrong_blocks(pool, range(6), 3) == 0
    assert wrong_blocks(pool[[4, 1]], (4, 1), 3) == 0
    assert wrong_blocks(pool[[4, 1]], (1, 4), 3) == 2
    assert wrong_blocks(pool, range(6), 4) == 6
    pool.view(6, -1).view(torch.int32)[2, 5] ^= 1
    assert wrong_blocks(pool, range(6), 3) == 1


@pytest.mark.parametrize("off", [1e-2, float("nan")])
def test_a_number_that_no_rounding_explains_is_seen(off: float) -> None:
    expected = torch.randn(5, 16, dtype=torch.float64)
    found = expected.float()
    Worst().near(found, expected, "it")
    found[3, 7] += off * expected[3].norm()
    with pytest.raises(Wrong, match="it: off by"):
        Worst().near(found, expected, "it")


def test_a_bit_that_differs_is_seen_and_so_is_a_nan() -> None:
    expected = torch.randn(5, 16)
    same(expected.clone(), expected, "it")
    with pytest.raises(Wrong, match="it: 1 of 80 numbers differ"):
        same(expected.index_put((torch.tensor(2), torch.tensor(3)), torch.tensor(9.0)), expected, "it")
    with pytest.raises(Wrong, match="NaN"):
        same(expected * float("nan"), expected * float("nan"), "it")


#: A fault that no check may miss, as what a process runs before it checks.
FAULTS = {
    "kernels.attend": "import prelay_engine.gpu.kernels.attention as m; m.powers = lambda scale, cap: (1.5 * scale, 0)",
    "kernels.write-kv": "import prelay_engine.gpu.kernels.write_kv as m; m.strides = lambda rows: (rows.stride(0), 0)",
    "kernels.sample": "import prelay_engine.gpu.draws as m; m.uniform = lambda seed, seq: 0.999",
    "ipc.writer-killed": "from prelay_kv.peerfile import PeerFile as p; p.generations = lambda _, b: (1,) * len(b)",
}


@pytest.mark.slow
@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_seen_by_its_check(name: str, tmp_path: Path) -> None:
    # Python imports this module at its start. The fault comes later: when a process is about to check.
    (tmp_path / "sitecustomize.py").write_text(
        "import sys\n"
        "class Late:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        f"        if name == 'gpucheck.child': exec({FAULTS[name]!r})\n"
        "sys.meta_path.insert(0, Late())\n"
    )
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    file = tmp_path / "found.json"
    done = run("--rehearse", "--only", name, "--json", str(file), PYTHONPATH=path)
    found = json.loads(file.read_text())["checks"][name]
    assert (done.returncode, found["result"], found["trace"]) == (1, FAILED, ""), found["why"]


def test_the_stand_in_writes_what_orjson_writes() -> None:
    import orjson

    value = {"a": [1, 2.5, None, True, "ü"], "tiles": tiles.Shape(64, 32, 4, 3)}
    assert standin.dumps(value) == orjson.dumps(value)
    assert standin.loads(orjson.dumps(value)) == orjson.loads(orjson.dumps(value))
    with pytest.raises(ValueError, match="property name"):
        standin.loads(b"{")
    with pytest.raises(TypeError):
        standin.dumps({1, 2})
