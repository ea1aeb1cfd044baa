"""`prelay batch run` against a small server that answers as OpenAI documents it, and fails where told."""

from __future__ import annotations

import io
import json
import os
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from prelay.batch import patience, watch
from prelay.batch.note import Notebook
from prelay.main import main
from tests.bed.ports import free_port
from tests.unit.cli.batch_server import DROP, LOSE, BatchStub, batch_stub


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "SOON_S", 0.005)
    monkeypatch.setattr(patience, "FIRST_WAIT_S", 0.005)
    monkeypatch.setattr(patience, "LONGEST_WAIT_S", 0.02)


@pytest.fixture
def stub() -> Iterator[BatchStub]:
    with batch_stub() as found:
        yield found


def write(folder: Path, count: int = 5, name: str = "in.jsonl") -> Path:
    path = folder / name
    body = {"model": "first", "prompt": "say"}
    lines = [
        {"custom_id": f"c{n}", "method": "POST", "url": "/v1/completions", "body": body | {"prompt": f"p{n}"}}
        for n in range(count)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def said(path: Path) -> dict[str, str]:
    return {row["custom_id"]: row["response"]["body"]["said"] for row in rows(path)}


def note(output: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(output.with_name(output.name + ".prelay").read_text())
    return found


def run(stub: BatchStub, *arguments: str | Path) -> int:
    return main(["batch", "run", *map(str, arguments), "--url", stub.url])


def test_every_line_gets_its_answer_and_the_exit_code_is_zero(
    stub: BatchStub, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "out.jsonl"
    assert run(stub, write(tmp_path), "-o", output) == 0
    assert said(output) == {f"c{n}": f"p{n}" for n in range(5)}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.jsonl", "out.jsonl", "out.jsonl.prelay"]
    assert stat.S_IMODE(output.stat().st_mode) == 0o666 & ~_umask()
    shown = capsys.readouterr()
    assert f"✓ {output}: 5 answers, 40 tokens, in " in shown.err.replace("\n", "")
    assert shown.out == ""


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def test_lines_that_fail_go_beside_the_output_and_the_exit_code_is_one(
    stub: BatchStub, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stub.bad = {"c1", "c3"}
    output = tmp_path / "out.jsonl"
    assert run(stub, write(tmp_path), "-o", output) == 1
    assert set(said(output)) == {"c0", "c2", "c4"}
    errors = tmp_path / "out.errors.jsonl"
    assert {row["custom_id"]: row["error"]["message"] for row in rows(errors)} == {"c1": "it is bad", "c3": "it is bad"}
    assert f"! {errors}: 2 lines without an answer" in capsys.readouterr().err.replace("\n", "")


def test_where_no_line_has_an_answer_the_output_is_there_and_empty(stub: BatchStub, tmp_path: Path) -> None:
    stub.bad = {f"c{n}" for n in range(5)}
    output = tmp_path / "out.jsonl"
    assert run(stub, write(tmp_path), "-o", output) == 1
    assert output.read_bytes() == b""
    assert len(rows(tmp_path / "out.errors.jsonl")) == 5


def test_ordered_is_the_order_of_the_input_in_both_files(stub: BatchStub, tmp_path: Path) -> None:
    stub.bad = {"c11", "c2", "c7"}
    output = tmp_path / "out.jsonl"
    assert run(stub, write(tmp_path, 13), "-o", output, "--ordered") == 1
    assert [row["custom_id"] for row in rows(output)] == [f"c{n}" for n in range(13) if n not in (2, 7, 11)]
    assert [row["custom_id"] for row in rows(tmp_path / "out.errors.jsonl")] == ["c2", "c7", "c11"]


def test_the_same_command_again_says_that_it_is_done_and_fresh_begins_anew(
    stub: BatchStub, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stub.bad = {"c1"}
    given, output = write(tmp_path), tmp_path / "out.jsonl"
    assert run(stub, given, "-o", output) == 1
    capsys.readouterr()
    assert run(stub, given, "-o", output) == 1
    assert "is the output of in.jsonl already" in capsys.readouterr().err
    assert len(stub.batches) == 1
    stub.bad = set()
    assert run(stub, given, "-o", output, "--fresh") == 0
    assert len(stub.batches) == 2
    assert len(rows(output)) == 5
    assert not (tmp_path / "out.errors.jsonl").exists(), "errors of the run before would look like those of this one"


def test_another_input_for_an_output_that_a_run_wrote_is_refused(
    stub: BatchStub, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "out.jsonl"
    assert run(stub, write(tmp_path), "-o", output) == 0
    assert run(stub, write(tmp_path, 6, "other.jsonl"), "-o", output) == 2
    assert "is of other lines (in.jsonl, batch_" in capsys.readouterr().err
    assert len(stub.batches) == 1


def test_an_output_that_no_run_wrote_is_not_replaced(
    stub: BatchStub, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "out.jsonl"
    output.write_text("precious")
    assert run(stub, write(tmp_path), "-o", output) == 2
    assert "--fresh to replace it" in capsys.readouterr().err
    assert output.read_text() == "precious"
    assert not (tmp_path / "out.jsonl.prelay").exists()
    assert run(stub, write(tmp_path), "-o", output, "--fresh") == 0


@pytest.mark.parametrize("where", ["POST /v1/files", "POST /v1/batches", "GET /v1/models"])
@pytest.mark.parametrize("fault", [DROP, LOSE, (503, {}), (429, {"retry-after": "0.01"})])
def test_an_answer_that_does_not_come_is_asked_for_again_and_one_batch_is_begun(
    stub: BatchStub, tmp_path: Path, where: str, fault: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    stub.faults = {where: [fault, fault]}
    given, output = tmp_path / "in.txt", tmp_path / "out.jsonl"
    given.write_text("one\n\ntwo\n")
    assert run(stub, given, "--text", "-o", output) == 0
    assert len(stub.batches) == 1
    assert said(output) == {"line-1": "one", "line-3": "two"}
    shown = capsys.readouterr().err
    assert shown.count("waiting for it") == 1
    assert shown.count("answers again") == 1


def test_a_server_that_goes_away_is_waited_for_and_said_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    port, output = free_port(), tmp_path / "out.jsonl"
    up, done = threading.Event(), threading.Event()

    def outage() -> None:
        with batch_stub(step=1, port=port) as first:
            up.set()
            until(lambda: sum(asked.startswith("GET /v1/batches/") for asked in first.asked) > 2)
        time.sleep(0.1)  # an outage is a span of time
        with batch_stub(port=port) as second:
            second.files, second.batches = first.files, first.batches
            done.wait(60)

    thread = threading.Thread(target=outage)
    thread.start()
    try:
        up.wait(60)
        url = f"http://127.0.0.1:{port}"
        assert main(["batch", "run", str(write(tmp_path, 50)), "-o", str(output), "--url", url]) == 0
    finally:
        done.set()
        thread.join()
    assert len(rows(output)) == 50
    shown = capsys.readouterr().err
    assert shown.count("waiting for it") == 1
    assert shown.count("answers again") == 1


def until(what: Any, timeout_s: float = 20) -> None:
    deadline = time.monotonic() + timeout_s
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_without_a_server_it_is_one_line_that_says_what_to_do(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "out.jsonl"
    url = f"http://127.0.0.1:{free_port()}"
    assert main(["batch", "run", str(write(tmp_path)), "-o", str(output), "--url", url]) == 1
    shown = capsys.readouterr().err
    assert f"prelay: no server answers at {url}" in shown
    assert "--serve" in shown
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]


@pytest.mark.parametrize("knows_ranges", [True, False])
def test_a_download_that_breaks_goes_on_and_the_file_is_whole(
    stub: BatchStub, tmp_path: Path, knows_ranges: bool
) -> None:
    stub.knows_ranges, output = knows_ranges, tmp_path / "out.jsonl"
    stub.cuts = 3
    assert run(stub, write(tmp_path, 200), "-o", output) == 0
    assert len(said(output)) == 200
    assert sum(asked.endswith("/content") for asked in stub.asked) == 4


def test_a_batch_that_failed_says_why_and_the_exit_code_is_three(
    stub: BatchStub, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stub.end, stub.step = "failed", 1
    stub.errors = [{"code": "x", "message": "the file has nothing in it", "line": 3}]
    output = tmp_path / "out.jsonl"
    assert run(stub, write(tmp_path), "-o", output) == 3
    shown = capsys.readouterr().err
    assert "is failed" in shown
    assert "the file has nothing in it (line 3)" in shown


@pytest.mark.parametrize("end", ["expired", "cancelled"])
def test_what_a_batch_had_at_its_end_is_written_and_the_exit_code_is_three(
    stub: BatchStub, tmp_path: Path, end: str
) -> None:
    stub.end, stub.step = end, 2
    output = tmp_path / "out.jsonl"
    assert run(stub, write(tmp_path), "-o", output) == 3
    assert len(rows(output)) == 2
    assert len(rows(tmp_path / "out.errors.jsonl")) == 3


def interrupted(stub: BatchStub, monkeypatch: pytest.MonkeyPatch, times: int = 1) -> None:
    """Let Ctrl-C come while the batch runs."""
    stub.step, left = 1, [KeyboardInterrupt] * times
    plain = time.sleep

    def sleep(seconds: float) -> None:
        if left:
            raise left.pop()
        plain(seconds)

    monkeypatch.setattr(watch.watch, "__defaults__", (sleep,))


def test_ctrl_c_leaves_the_batch_and_says_how_to_go_on_and_resume_does(
    stub: BatchStub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "out.jsonl"
    interrupted(stub, monkeypatch)
    assert run(stub, write(tmp_path), "-o", output) == 130
    (batch,) = stub.batches.values()
    shown = capsys.readouterr().err
    assert f"! {batch['id']} goes on without this command" in shown
    assert f"prelay batch run -o {output} --resume\n" in shown
    assert f"prelay batch cancel {batch['id']} --url {stub.url}\n" in shown
    assert not output.exists()
    stub.step = 1000
    # neither the input nor the URL need be said again: the note has both
    assert main(["batch", "run", "-o", str(output), "--resume"]) == 0
    assert "goes on with batch_" in capsys.readouterr().err
    assert len(stub.batches) == 1
    assert len(rows(output)) == 5


def test_ctrl_c_with_cancel_on_interrupt_cancels_and_fetches_what_there_is(
    stub: BatchStub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = tmp_path / "out.jsonl"
    interrupted(stub, monkeypatch)
    assert run(stub, write(tmp_path), "-o", output, "--cancel-on-interrupt") == 3
    assert len(rows(output)) == 1
    assert len(rows(tmp_path / "out.errors.jsonl")) == 4


def test_ctrl_c_at_the_very_end_of_a_batch_cancels_nothing(
    stub: BatchStub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output, stub.step = tmp_path / "out.jsonl", 3

    def end(*_: object) -> None:
        for batch in stub.batches.values():
            stub.advance(batch)
        raise KeyboardInterrupt

    sleeps = iter([end])
    monkeypatch.setattr(watch.watch, "__defaults__", (lambda seconds: next(sleeps, time.sleep)(seconds),))
    assert run(stub, write(tmp_path), "-o", output, "--cancel-on-interrupt") == 0
    assert len(rows(output)) == 5


def test_a_run_that_died_between_its_question_and_the_answer_finds_its_batch(stub: BatchStub, tmp_path: Path) -> None:
    given, output = write(tmp_path), tmp_path / "out.jsonl"
    assert run(stub, given, "-o", output) == 0
    path = output.with_name("out.jsonl.prelay")
    path.write_text(json.dumps(note(output) | {"batch": "", "over": False}))
    output.unlink()
    assert run(stub, given, "-o", output) == 0
    assert len(stub.batches) == 1
    assert len(rows(output)) == 5


def test_a_batch_that_the_server_no_longer_has_is_one_line(
    stub: BatchStub, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given, output = write(tmp_path), tmp_path / "out.jsonl"
    assert run(stub, given, "-o", output) == 0
    output.unlink()
    stub.batches.clear()
    assert run(stub, given, "-o", output) == 1
    assert "--fresh begins anew" in capsys.readouterr().err


def test_two_runs_never_write_one_output(stub: BatchStub, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "out.jsonl"
    other = Notebook(output)
    assert run(stub, write(tmp_path), "-o", output) == 2
    assert "another prelay batch run is writing" in capsys.readouterr().err
    other.close()
    assert run(stub, write(tmp_path), "-o", output) == 0


def test_prompts_of_stdin_become_chats(stub: BatchStub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO("Grüße\r\nzwei".encode())))
    output = tmp_path / "out.jsonl"
    options = ("--text", "--system", "Be short.", "--max-tokens", "7", "--temperature", "0.5", "--model", "second")
    assert run(stub, "-", "-o", output, *options) == 0
    (batch,) = stub.batches.values()
    first, second = stub.lines(batch)
    assert first == {
        "custom_id": "line-1",
        "method": "POST",
        "url": "/v1/chat/completions",
        "body": {
            "model": "second",
            "messages": [{"role": "system", "content": "Be short."}, {"role": "user", "content": "Grüße"}],
            "max_tokens": 7,
            "temperature": 0.5,
        },
    }
    assert second["body"]["messages"][1]["content"] == "zwei"
    assert batch["endpoint"] == "/v1/chat/completions"
    assert batch["metadata"]["input"] == "stdin"


def test_a_csv_file_becomes_completions_of_the_first_model(stub: BatchStub, tmp_path: Path) -> None:
    given, output = tmp_path / "table.CSV", tmp_path / "out.jsonl"
    given.write_bytes('\ufeffcustom_id,question\r\na,"two\r\nlines, ""quoted"""\r\n,second\r\n'.encode())
    assert run(stub, given, "-o", output, "--prompt-column", "question") == 0
    (batch,) = stub.batches.values()
    first, second = stub.lines(batch)
    assert first["custom_id"] == "a"
    assert first["body"] == {"model": "first", "prompt": 'two\r\nlines, "quoted"'}
    assert second["custom_id"] == "row-2"


@pytest.mark.parametrize(
    ("content", "arguments", "words"),
    [
        (b"", [], "has no line: nothing to run"),
        (b"\n\n", [], "has no line"),
        (b"hello\n", [], "--text for a file of prompts"),
        (b"caf\xe9\n", ["--text"], "is not UTF-8"),
        (b"a,b\n1,2\n", ["--csv"], "has no column 'prompt' (--prompt-column): its columns are a, b"),
        (b"a,prompt\n1\n", ["--csv"], "row 1: no prompt"),
        (b'prompt\n"open', ["--csv"], "no CSV"),
        (b"x\n", ["--text", "--csv"], "give one of them"),
        (b"x\n", ["--chat"], "--chat is for prompts"),
        (b"x\n", ["--endpoint", "/v1/embeddings"], "--endpoint must be /v1/completions or /v1/chat/completions"),
        (b"x\n", ["--text", "--window", "5s"], '--window must be a time from "1m" to "30d"'),
        (b"x\n", ["--text", "--window", "31d"], "such as \"24h\", not '31d'"),
        (b"x\n", ["--resume", "--fresh"], "give one of them"),
        (b"x\n", ["--", "--decode", "2"], "which only --serve starts"),
        (b"x\n", ["--serve"], "--serve starts a server, and --url names one"),
    ],
)
def test_bad_input_is_one_line_and_leaves_nothing(
    stub: BatchStub,
    tmp_path: Path,
    content: bytes,
    arguments: list[str],
    words: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    given = tmp_path / "in"
    given.write_bytes(content)
    command = ["batch", "run", str(given), "-o", str(tmp_path / "out.jsonl"), "--url", stub.url, *arguments]
    assert main(command) == 2
    shown = capsys.readouterr().err
    assert words in shown
    assert shown.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["in"]
    assert not stub.batches


@pytest.mark.parametrize(
    ("output", "words"),
    [("no/out.jsonl", "there is no folder"), (".", "is a folder"), ("-", "give a file"), ("", "give -o FILE")],
)
def test_an_output_that_cannot_be_written_is_found_out_first(
    stub: BatchStub, tmp_path: Path, output: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    where = str(tmp_path / output) if output not in ("-", "") else output
    assert run(stub, write(tmp_path), "-o", where) == 2
    assert words in capsys.readouterr().err
    assert not stub.asked


def test_a_refusal_of_the_server_is_in_its_own_words(
    stub: BatchStub, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stub.faults = {"POST /v1/files": [(413, {})]}
    assert run(stub, write(tmp_path), "-o", tmp_path / "out.jsonl") == 1
    assert "prelay: status 413 as planned (status 413)" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]


def test_the_key_of_the_environment_is_sent(stub: BatchStub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PRELAY_API_KEY", "sesame,other")
    assert run(stub, write(tmp_path), "-o", tmp_path / "out.jsonl") == 0
    assert stub.keys == {"Bearer sesame"}


def test_a_sigterm_leaves_no_half_file_and_the_batch(tmp_path: Path) -> None:
    with batch_stub(step=0) as stub:
        command = [sys.executable, "-m", "prelay", "batch", "run", str(write(tmp_path)), "-o", str(tmp_path / "out")]
        process = subprocess.Popen([*command, "--url", stub.url], stderr=subprocess.PIPE)
        until(lambda: len(stub.asked) > 3)
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 143
        assert process.stderr is not None
        assert b"Traceback" not in process.stderr.read()
        process.stderr.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.jsonl", "out.prelay"]
