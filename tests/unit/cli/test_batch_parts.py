"""The parts of `prelay batch` that decide, without a server."""

from __future__ import annotations

import io
import math
import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prelay.batch.batch import Batch
from prelay.batch.course import Course, Wish, choose
from prelay.batch.download import errors_path, replacing
from prelay.batch.lines import Shape, endpoint_of, from_text
from prelay.batch.note import Note, Notebook
from prelay.batch.order import in_order
from prelay.batch.patience import Patience
from prelay.batch.rate import WINDOW_S, Rate
from prelay.batch.watch import clock, speed
from prelay.errors import BadUsage, CliError

NOTE = Note("run", "digest", "in.jsonl", "http://x", batch="batch_1")


@pytest.mark.parametrize(
    ("note", "digest", "exists", "fresh", "found"),
    [
        (None, "digest", False, False, Course.BEGIN),
        (None, "digest", True, False, "no run left it"),
        (None, None, False, False, "nothing to go on with"),
        (None, "digest", True, True, Course.BEGIN),
        (NOTE, "digest", False, False, Course.GO_ON),
        (NOTE, None, False, False, Course.GO_ON),
        (NOTE, "digest", True, False, Course.GO_ON),  # an output of before --fresh, not yet replaced
        (NOTE, "other", False, False, "is of other lines"),
        (NOTE, "other", True, True, Course.BEGIN),
        ("over", "digest", True, False, Course.OVER),
        ("over", None, True, False, Course.OVER),
        ("over", "digest", False, False, Course.GO_ON),  # somebody removed the output: it is fetched again
        ("unknown", "digest", False, False, Course.GO_ON),
        ("unknown", None, False, False, "name the input again"),
    ],
)
def test_what_a_run_does_with_what_an_earlier_one_left(
    tmp_path: Path, note: Note | str | None, digest: str | None, exists: bool, fresh: bool, found: Course | str
) -> None:
    output = tmp_path / "out.jsonl"
    if exists:
        output.touch()
    notes = {"over": Note("r", "digest", "in", "u", "batch_1", over=True), "unknown": Note("r", "digest", "in", "u")}
    chosen = notes[note] if isinstance(note, str) else note
    wish = Wish(output, resume=digest is None, fresh=fresh)
    if isinstance(found, Course):
        assert choose(wish, chosen, digest) is found
    else:
        with pytest.raises(BadUsage, match=found):
            choose(wish, chosen, digest)


def test_a_note_comes_back_as_it_was_written_and_what_is_none_is_refused(tmp_path: Path) -> None:
    output = tmp_path / "out"
    book = Notebook(output)
    book.write(NOTE)
    book.write(NOTE, batch="b", over=True, status="completed", completed=3)
    book.close()
    again = Notebook(output)
    assert again.note == Note("run", "digest", "in.jsonl", "http://x", "b", True, "completed", 3)
    again.close()
    for raw in (b"[]", b"{}", b'{"run": 1}', b"not json", NOTE.encode().replace(b'"batch_1"', b"7")):
        again.path.write_bytes(raw)
        with pytest.raises(BadUsage, match="is no note of a run"):
            Notebook(output)


@given(st.lists(st.integers(0, 10**9), unique=True), st.booleans())
def test_results_come_in_the_order_of_their_lines(numbers: list[int], last_line_has_an_end: bool) -> None:
    lines = [b'{"id": "batch_req_00ff_%d", "custom_id": "batch_req_x_%d"}\n' % (n, n % 7) for n in numbers]
    content = b"".join(lines)
    into = io.BytesIO()
    with tempfile.TemporaryFile() as unordered:
        unordered.write(content if last_line_has_an_end else content.removesuffix(b"\n"))
        unordered.flush()
        in_order(unordered, into)
    assert into.getvalue() == b"".join(line for _, line in sorted(zip(numbers, lines, strict=True)))


def test_results_of_another_server_cannot_be_put_in_order() -> None:
    with tempfile.TemporaryFile() as unordered:
        unordered.write(b'{"id": "batch_req_123", "custom_id": "a"}\n')
        unordered.flush()
        with pytest.raises(CliError, match="leave --ordered out"):
            in_order(unordered, io.BytesIO())


def test_a_rate_is_that_of_the_last_half_minute() -> None:
    rate = Rate()
    assert (rate.tokens_per_s(), rate.lines_per_s(), rate.left_s()) == (None, None, None)
    for second in range(100):
        lines = min(second, 50) * 10 + max(0, second - 50) * 100
        rate.see(float(second), Batch("b", "in_progress", total=10_000, completed=lines, tokens=lines * 8))
    assert rate.lines_per_s() == pytest.approx(100)
    assert rate.tokens_per_s() == pytest.approx(800)
    assert rate.left_s() == pytest.approx((10_000 - 5400) / 100)
    assert speed(rate) == "800 tok/s  eta 0:46"
    assert WINDOW_S < 50


def test_a_batch_that_stands_still_has_no_end_in_sight_and_one_that_fell_back_begins_anew() -> None:
    rate = Rate()
    rate.see(-2, Batch("b", "validating"))
    rate.see(-1, Batch("b", "in_progress", total=10))
    assert speed(rate) == ""
    rate = Rate()
    rate.see(0, Batch("b", "in_progress", total=10, completed=5))
    rate.see(1, Batch("b", "in_progress", total=10, completed=5))
    assert speed(rate) == "0.0 lines/s"
    rate.see(2, Batch("b", "in_progress", total=10, completed=2))
    assert speed(rate) == ""
    rate.see(3, Batch("b", "in_progress", total=10, completed=4))
    assert speed(rate) == "2.0 lines/s  eta 0:03"


@pytest.mark.parametrize(("seconds", "shown"), [(0, "0:00"), (59.6, "1:00"), (754, "12:34"), (18367, "5:06:07")])
def test_a_span_of_time_reads_like_a_clock(seconds: float, shown: str) -> None:
    assert clock(seconds) == shown


def test_waits_double_up_to_a_bound_and_a_server_may_ask_for_longer_ones() -> None:
    waits: list[float] = []
    said: list[str] = []
    patience = Patience("it", said.append, sleep=waits.append)
    for _ in range(7):
        patience.lost("gone")
    patience.lost("busy", retry_after_s=12)
    patience.lost("busy", retry_after_s=100_000)
    assert waits == [0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0, 12, 60.0]
    patience.heard()
    patience.lost("gone")
    assert waits[-1] == 0.2
    assert [words.partition(" (")[0] for words in said] == [
        "it does not serve now",
        "it answers again after 0 s",
        "it does not serve now",
    ]


def test_patience_has_a_limit_and_what_its_check_raises_ends_it() -> None:
    with pytest.raises(CliError, match="it does not serve: gone"):
        Patience("it", print, limit_s=0).lost("gone")

    def check() -> None:
        raise CliError("the server ended")

    with pytest.raises(CliError, match="the server ended"):
        Patience("it", print, limit_s=math.inf, check=check).lost("gone")


def test_prompts_keep_their_spaces_and_their_line_numbers() -> None:
    assert list(from_text(["  a \n", "\n", " \t\n", "b"])) == [("line-1", "  a "), ("line-4", "b")]


def test_a_line_says_where_it_goes() -> None:
    assert endpoint_of(Shape("m").line("a", "b")) == "/v1/completions"
    assert endpoint_of(Shape("m", chat=True).line("a", "b")) == "/v1/chat/completions"
    for line in (b"{}", b"[]", b"7", b'{"url": "/v1/embeddings"}', b'{"url": 7}', b"\xff"):
        assert endpoint_of(line) is None


@pytest.mark.parametrize(
    ("output", "errors"),
    [("out.jsonl", "out.errors.jsonl"), ("out", "out.errors.jsonl"), ("a.b.txt", "a.b.errors.txt")],
)
def test_errors_lie_beside_the_output(output: str, errors: str) -> None:
    assert errors_path(Path("/x") / output) == Path("/x") / errors


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "out"
    path.write_text("before")
    with pytest.raises(ZeroDivisionError), replacing(path) as file:
        file.write(b"half" * (1 // 0))
    assert path.read_text() == "before"
    with replacing(path) as file:
        file.write(b"whole")
    assert path.read_text() == "whole"
    assert [entry.name for entry in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("body", [None, [], {}, {"id": "b"}, {"id": "b", "status": "x", "request_counts": 7}])
def test_what_is_no_batch_is_said_to_be_none(body: object) -> None:
    with pytest.raises(CliError, match="is no batch"):
        Batch.decode(body)
