"""How the checks of `prelay doctor` are entered and run, and what is shown of them."""

from __future__ import annotations

import io
import json

import pytest
from rich.console import Console

from prelay.doctor import GROUPS
from prelay.doctor.facts import Facts, NothingToLookAt
from prelay.doctor.finding import Finding, Result, Row, State, fail, ok, some, warn
from prelay.doctor.registry import Checks, run
from prelay.doctor.table import as_json, show
from prelay.errors import CliError, ServerError
from prelay.settings import Settings, load


class Known(Facts):
    """With one fact that cannot be found out, and one that there is none of."""

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self.error = ServerError("it does not answer")

    def broken(self) -> int:
        raise self.error

    def nothing(self) -> int:
        raise NothingToLookAt


def broken(facts: Facts) -> int:
    assert isinstance(facts, Known)
    return facts.broken()


def nothing(facts: Facts) -> int:
    assert isinstance(facts, Known)
    return facts.nothing()


def check_of(subject: object, *names: str) -> Checks:
    checks = Checks("a group")
    for name in names:
        checks.of(name, subject, "start it")(lambda _: ok("fine"))  # type: ignore[arg-type]
    return checks


def test_a_check_is_one_function_and_its_row_has_its_name() -> None:
    checks = Checks("a group")

    @checks.of("port number", Facts.settings)
    def judge(settings: Settings) -> Finding:
        return ok(str(settings.port))

    result = run([checks], Facts(load({"port": "81"}, None)))
    assert result == Result((Row("a group", "port number", ok("81")),))
    assert judge(load({}, None)).found == "8000", "the function stays what it was"


def test_what_cannot_be_found_out_fails_once_with_what_to_do_and_the_rest_is_named_as_skipped() -> None:
    groups = [check_of(broken, "first", "second"), check_of(Facts.settings, "third"), check_of(broken, "fourth")]
    result = run(groups, Known(load({}, None)))
    assert [(row.name, row.finding) for row in result.rows] == [
        ("first", fail("it does not answer", "start it")),
        ("third", ok("fine")),
    ]
    assert result.skipped == ("second", "fourth")
    assert not result.is_sound


def test_a_check_of_what_there_is_none_of_has_no_row_and_is_not_skipped() -> None:
    assert run([check_of(nothing, "first")], Known(load({}, None))) == Result(())


def test_a_fact_is_found_out_once_and_an_error_stays_the_same_object(monkeypatch: pytest.MonkeyPatch) -> None:
    facts = Facts(load({"model": "/no/such/folder"}, None))
    errors = []
    for _ in range(2):
        with pytest.raises(CliError) as failed:
            facts.model()
        errors.append(failed.value)
    assert errors[0] is errors[1]


def test_every_check_has_a_name_of_its_own() -> None:
    names = [check.name for group in GROUPS for check in group.checks]
    assert len(names) == len(set(names))
    assert len(names) >= 25


ROWS = (
    Row("this machine", "memory", ok("22 GiB free")),
    Row("this machine", "/dev/shm", fail("/a/very/long/path" * 12, "make it larger")),
    Row("left in Redis", "dead letters", warn("9: a, b, c and 6 more", "look at the logs", tuple("abcdefghi"))),
)


@pytest.mark.parametrize("width", [40, 80, 120])
def test_nothing_is_cut_off_at_any_width_and_no_line_is_longer(width: int) -> None:
    out = io.StringIO()
    show(Result(ROWS, ("eviction",)), Console(file=out, width=width, highlight=False))
    lines = out.getvalue().splitlines()
    assert max(map(len, lines)) <= width
    text = "".join(line[15:].strip() for line in lines[1:-4])
    assert "/a/very/long/path" * 12 in text
    assert "…" not in out.getvalue()
    shown = " ".join(" ".join(lines).split())
    assert "✗ /dev/shm" in shown
    assert "→ make it larger" in shown
    assert "not looked at, for what failed above: eviction" in shown
    assert "1 ok, 1 to look at, 1 failed" in shown


def test_the_groups_are_headings_and_a_row_without_advice_has_no_arrow() -> None:
    out = io.StringIO()
    show(Result(ROWS[:1]), Console(file=out, width=80, highlight=False))
    assert [line.rstrip() for line in out.getvalue().splitlines()] == [
        "   this machine",
        "✓  memory        22 GiB free",
        "",
        "1 ok, 0 to look at, 0 failed",
    ]


def test_machines_get_every_item_and_the_verdict() -> None:
    found = json.loads(as_json(Result(ROWS, ("eviction",))))
    assert found["ok"] is False
    assert found["skipped"] == ["eviction"]
    assert found["checks"][2] == {
        "group": "left in Redis", "name": "dead letters", "state": "warn", "found": "9: a, b, c and 6 more",
        "advice": "look at the logs", "items": list("abcdefghi"),
    }  # fmt: skip
    assert json.loads(as_json(Result(ROWS[::2])))["ok"] is True, "a warning does not count"


def test_a_long_list_shows_its_beginning_and_how_much_more_there_is() -> None:
    assert some(["a"]) == "a"
    assert some(list("abc")) == "a, b, c"
    assert some(list("abcde")) == "a, b, c and 2 more"
    assert str(State.WARN) == "warn"
