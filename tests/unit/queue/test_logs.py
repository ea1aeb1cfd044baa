"""Log lines for machines."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator

import pytest

from prelay_queue import logs


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> Iterator[io.StringIO]:
    """What is logged as JSON, for the time of a test."""
    stream = io.StringIO()
    root = logging.getLogger()
    monkeypatch.setattr(root, "handlers", [])
    before = root.level
    logs.set_up("info", "json", stream)
    yield stream
    root.setLevel(before)


def lines(stream: io.StringIO) -> list[dict[str, object]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_a_line_about_a_job_has_its_request_and_epoch_and_what_the_process_is(said: io.StringIO) -> None:
    logs.name_process(worker="host:1:abc")
    logging.getLogger("prelay.x").warning("%s goes on", "r/1", extra=logs.about("r/1", 3))
    logging.getLogger("prelay.x").debug("not said")
    (line,) = lines(said)
    assert str(line.pop("time")).endswith("+00:00")
    assert line == {
        "level": "warning", "logger": "prelay.x", "message": "r/1 goes on",
        "worker": "host:1:abc", "request": "r", "job": "r/1", "epoch": 3,
    }  # fmt: skip


def test_an_exception_is_in_the_same_line(said: io.StringIO) -> None:
    try:
        raise ValueError("two\nlines")
    except ValueError:
        logging.getLogger("prelay.x").exception("it failed")
    (line,) = lines(said)
    assert "ValueError: two\nlines" in str(line["exception"])


def test_what_is_no_unicode_is_logged_all_the_same() -> None:
    record = logging.LogRecord("prelay.x", logging.ERROR, "x.py", 1, "no file %s", ("\udcff",), None)
    assert json.loads(logs.JsonLines().format(record))["message"] == "no file ?"


def test_a_level_or_a_form_that_was_set_up_already_stays(said: io.StringIO) -> None:
    logs.set_up("error", "text")
    logging.getLogger("prelay.x").info("still JSON")
    assert lines(said)[0]["message"] == "still JSON"
