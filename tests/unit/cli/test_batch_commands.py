"""`prelay batch submit | status | cancel | download` against the same small server."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from prelay.batch import watch
from prelay.main import main
from tests.unit.cli.batch_server import BatchStub, batch_stub


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "SOON_S", 0.005)
    monkeypatch.setenv("COLUMNS", "80")


@pytest.fixture
def stub() -> Iterator[BatchStub]:
    with batch_stub() as found:
        yield found


def submitted(stub: BatchStub, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> str:
    (tmp_path / "in.txt").write_text("one\ntwo\nthree\n")
    assert main(["batch", "submit", str(tmp_path / "in.txt"), "--text", "--url", stub.url, "--window", "7d"]) == 0
    shown = capsys.readouterr()
    assert "prelay batch status batch_" in shown.err
    return shown.out.strip()


def test_submit_prints_the_id_alone_on_stdout(
    stub: BatchStub, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    batch = submitted(stub, tmp_path, capsys)
    assert list(stub.batches) == [batch]
    assert stub.batches[batch]["completion_window"] == "7d"


def test_status_lists_the_newest_first_and_shows_one(
    stub: BatchStub, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["batch", "status", "--url", stub.url]) == 0
    assert capsys.readouterr().out == f"no batches on {stub.url}\n"
    first, second = submitted(stub, tmp_path, capsys), submitted(stub, tmp_path, capsys)
    assert main(["batch", "status", first, "--url", stub.url]) == 0
    shown = capsys.readouterr().out
    assert f"batch     {first}\n" in shown
    assert "status    completed\n" in shown
    assert "lines     3 done, 0 failed, of 3\n" in shown
    assert main(["batch", "status", "--url", stub.url]) == 0
    listed = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in listed] == ["batch", second, first]
    *shown_of_first, age, name = listed[2].split()[1:]
    assert shown_of_first == ["completed", "3", "0", "3"]
    assert (age[:3], name) == ("0:0", "in.txt")
    assert main(["batch", "status", "--url", stub.url, "--limit", "1", "--json"]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    assert json.loads(line)["id"] == second


def test_status_watch_stays_until_the_end_and_has_the_exit_code_of_a_run(
    stub: BatchStub, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stub.step, stub.bad = 1, {"line-2"}
    batch = submitted(stub, tmp_path, capsys)
    assert main(["batch", "status", batch, "--url", stub.url, "--watch"]) == 1
    shown = capsys.readouterr()
    assert "… in_progress 1 of 3\n" in shown.err
    assert "… in_progress 2 of 3, 1 failed" in shown.err
    assert "status    completed\n" in shown.out


def test_cancel_and_download_what_there_is(
    stub: BatchStub, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    stub.step = 1
    batch, output = submitted(stub, tmp_path, capsys), tmp_path / "out.jsonl"
    download = ["batch", "download", batch, "--url", stub.url, "-o"]
    assert main([*download, str(output)]) == 1
    assert "is in_progress (1 of 3 lines): its files come at its end" in capsys.readouterr().err
    assert main(["batch", "cancel", batch, "--url", stub.url]) == 0
    assert f"{batch} is cancelling" in capsys.readouterr().err
    assert main([*download, str(output)]) == 3
    assert len(output.read_text().splitlines()) == 1
    assert len((tmp_path / "out.errors.jsonl").read_text().splitlines()) == 2
    stdout = io.TextIOWrapper(io.BytesIO())
    monkeypatch.setattr(sys, "stdout", stdout)
    assert main([*download, "-", "--ordered"]) == 3
    assert stdout.buffer.getvalue() == output.read_bytes()


@pytest.mark.parametrize("command", [["status"], ["cancel"], ["download", "-o", "x"]])
def test_an_id_is_no_path_and_an_unknown_one_is_in_the_words_of_the_server(
    stub: BatchStub, command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["batch", *command, "../models", "--url", stub.url]) == 1
    assert "'../models' is no id" in capsys.readouterr().err
    assert main(["batch", *command, "batch_0", "--url", stub.url]) == 1
    assert "there is no /v1/batches/batch_0" in capsys.readouterr().err
