"""What a report says of its origin, and how it is drawn and written."""

from __future__ import annotations

import json
import math
import os
import subprocess
from itertools import pairwise
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prelay.bench import facts, proc
from prelay.bench.client import Manner
from prelay.bench.figures import Slo
from prelay.bench.output import Report, Sheet, Wanted, deliver, shown
from prelay.bench.plot import Panel, draw, scale
from prelay.bench.serve import Plan
from prelay.bench.target import about_workers
from prelay.errors import BadUsage, CliError

SVG = "{http://www.w3.org/2000/svg}"


def git(root: Path, *words: str) -> None:
    who = ["-c", "user.name=Nobody", "-c", "user.email=nobody@example.org", "-c", "commit.gpgsign=false"]
    subprocess.run(["git", "-C", str(root), *who, *words], check=True, capture_output=True)


def checkout(root: Path) -> Path:
    (root / "cli" / "prelay").mkdir(parents=True)
    (root / "cli" / "prelay" / "code.py").write_text("1")
    git(root, "init", "-q")
    git(root, "add", ".")
    git(root, "commit", "-q", "-m", "one")
    return root


def test_a_report_names_the_commit_and_whether_the_sources_differ_from_it(tmp_path: Path) -> None:
    root = checkout(tmp_path / "repo")
    clean = facts.commit(root)
    assert clean is not None
    assert len(clean) == 12
    (root / "figures.json").touch()  # what was measured is no source
    assert facts.commit(root) == clean
    (root / "cli" / "prelay" / "code.py").write_text("2")
    assert facts.commit(root) == f"{clean}+dirty"


def test_what_is_installed_inside_another_checkout_has_no_commit(tmp_path: Path) -> None:
    git(tmp_path, "init", "-q")
    assert facts.commit(tmp_path) is None
    assert facts.commit(tmp_path / "none") is None


def test_facts_name_machine_versions_and_notes() -> None:
    found = facts.gather(["server=another 1.2", "disk = fast"])
    assert found["notes"] == {"server": "another 1.2", "disk": "fast"}
    assert found["cores"] == len(os.sched_getaffinity(0))
    assert None not in (found["torch"], found["transformers"], found["cpu"])
    facts.finish(found)
    assert found["load_at_end"] >= 0
    with pytest.raises(BadUsage, match="--note must be NAME=VALUE, not 'x'"):
        facts.gather(["x"])


@pytest.mark.parametrize(("load", "busy"), [(0.9, False), (1.1, True)])
def test_a_busy_machine_is_said(monkeypatch: pytest.MonkeyPatch, load: float, busy: bool) -> None:
    monkeypatch.setattr(os, "getloadavg", lambda: (load, 9.0, 9.0))
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    words = facts.warning(facts.gather())
    assert (words is not None) is busy
    assert words is None or "load 1.1 on 2 core(s)" in words


def beat(role: str, **more: Any) -> dict[str, Any]:
    return {"role": role, "exact": "true", "dtype": "float32", "kv": {"total": 9, "free": 9}, **more}


def test_workers_are_summed_up_in_a_word_each() -> None:
    found = about_workers([beat("prefill", threads=2), beat("decode", threads=1, exact="false")])
    assert (found["mode"], found["exact"], found["threads"]) == ("disaggregated", "false and true", "1 and 2")
    assert [worker["kv_blocks"] for worker in found["workers"]] == [9, 9]
    assert about_workers([beat("unified")])["mode"] == "unified"
    assert about_workers([beat("unified"), beat("decode")])["mode"] == "decode+unified"
    none = about_workers([])
    assert (none["mode"], none["exact"], none["workers"]) == (None, None, [])


@given(st.floats(1e-6, 1e9))
def test_a_scale_has_a_few_even_ticks_from_zero_to_just_above_the_highest(highest: float) -> None:
    ticks = scale(highest)
    steps = {round((b - a) / ticks[1], 6) for a, b in pairwise(ticks)}
    assert ticks[0] == 0
    assert steps == {1}
    assert ticks[-2] < highest * (1 + 1e-6)
    assert ticks[-1] >= highest * (1 - 1e-6)
    assert 4 <= len(ticks) <= 8


def test_an_empty_scale_can_be_drawn() -> None:
    assert scale(0) == scale(math.nan) == [0, 1]
    ElementTree.fromstring(draw("t", "n", [Panel("p", "x", "y", [])]))


def test_every_point_of_a_series_is_in_the_picture_and_inside_its_panel() -> None:
    series = [("p50 <&>", [(1.0, 10.0), (8.0, 40.0)]), ("p99", [(1.0, 20.0), (8.0, 90.0)])]
    picture = ElementTree.fromstring(draw('a "title" & more', "note", [Panel("one", "x", "y", series, even=True)] * 2))
    lines = [line.attrib["points"].split() for line in picture.iter(f"{SVG}polyline")]
    assert [len(line) for line in lines] == [2, 2, 2, 2]
    first = [tuple(map(float, point.split(","))) for point in lines[0]]
    assert first[0][0] < first[1][0]
    assert first[0][1] > first[1][1]  # higher is nearer to the top
    circles = list(picture.iter(f"{SVG}circle"))
    assert len(circles) == 8
    assert all(0 < float(c.attrib["cx"]) < 420 and 0 < float(c.attrib["cy"]) < 300 for c in circles)
    words = [found.text for found in picture.iter(f"{SVG}text")]
    assert {'a "title" & more', "note", "p50 <&>", "x", "y"} <= set(words)


def report() -> Report:
    data = {"facts": facts.gather(), "levels": [1]}
    sheets: list[Sheet] = [("", ["level", "figure"], [[1, 1234.5678], [2, None]])]
    return Report("title", data, lambda: sheets, lambda: [Panel("p", "x", "y", [("s", [(1, 2)])])])


def test_json_on_stdout_is_alone_there(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    deliver(report(), Wanted("-", str(tmp_path / "p.svg")))
    shown_ = capsys.readouterr()
    assert json.loads(shown_.out)["levels"] == [1]
    assert shown_.err == f"wrote {tmp_path / 'p.svg'}\n"


def test_a_table_is_shown_beside_files_and_is_never_broken(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    deliver(report(), Wanted(str(tmp_path / "r.json")))
    out = capsys.readouterr().out
    assert "title" in out
    assert "1235" in out
    assert "–" in out
    assert json.loads((tmp_path / "r.json").read_text())["levels"] == [1]


def test_a_file_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(CliError, match="cannot write"):
        deliver(report(), Wanted(str(tmp_path)))


def test_outputs_are_checked_before_anything_is_measured(tmp_path: Path) -> None:
    with pytest.raises(BadUsage, match=r"ends in \.svg, not x\.png"):
        Wanted(plot="x.png").check()
    with pytest.raises(BadUsage, match="there is no such folder"):
        Wanted(json=str(tmp_path / "none" / "x.json")).check()
    Wanted("-", str(tmp_path / "x.svg")).check()


@pytest.mark.parametrize(
    ("cell", "words"), [(None, "–"), (3, "3"), (0.12344, "0.1234"), (12345.6, "12346"), ("a", "a")]
)
def test_figures_are_shown_with_four_digits(cell: object, words: str) -> None:
    assert shown(cell) == words


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"concurrency": (1,), "rates": (1.0,)}, "give one of them"),
        ({"count": 1, "duration_s": 1.0}, "give one of them"),
        ({"find_goodput": True}, "--find-goodput needs --slo"),
        ({"find_goodput": True, "slo": Slo({"ttft": 1}), "rates": (1.0, 2.0)}, "takes one --rate"),
        ({"find_goodput": True, "slo": Slo({"ttft": 1}), "concurrency": (1,)}, "no --concurrency"),
    ],
)
def test_what_does_not_go_together_is_said(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(BadUsage, match=words):
        Plan("http://x", Manner("m"), lambda _: iter(()), **changes).check()


def test_a_process_can_be_asked_for_its_time_memory_and_children() -> None:
    with subprocess.Popen(["sleep", "60"]) as child:
        try:
            assert child.pid in dict(proc.children(os.getpid()))
        finally:
            child.kill()
    assert proc.cpu_s(os.getpid()) > 0
    proc.forget_peak()
    held = bytearray(os.urandom(1 << 20) * 64)
    found = proc.memory()
    assert found["peak"] >= found["rss"] > len(held)
    assert 0 < found["anonymous"] <= found["rss"]
