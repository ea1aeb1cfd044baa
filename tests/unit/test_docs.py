"""Pages that are made from code say what the code says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from prelay.geometry import Geometry
from prelay_queue.metric_table import TABLE
from prelay_text.effects import effect_of
from prelay_text.parameters import Route, parameters_of
from scripts import compatibility, metrics

ROOT = Path(__file__).parents[2]
OPERATIONS = ROOT / "docs" / "operations.md"


def test_the_tables_of_the_compatibility_page_are_those_of_the_parameters() -> None:
    text = compatibility.PAGE.read_text()
    assert compatibility.page(text) == text, "run python scripts/compatibility.py"


def test_both_tables_are_on_the_page_and_have_every_parameter() -> None:
    text = compatibility.PAGE.read_text()
    for name in {row.name for route in compatibility.ROUTES for row in parameters_of(route).values()}:
        assert f"\n| `{name}` | " in text


@pytest.mark.parametrize("route", [Route.COMPLETION, Route.CHAT])
def test_every_parameter_that_is_implemented_says_what_it_does(route: Route) -> None:
    for row in parameters_of(route).values():
        if row.check is not None:
            assert effect_of(row, route).endswith(".")


def test_the_table_of_kv_sizes_is_what_a_geometry_says() -> None:
    _, _, page = OPERATIONS.read_text().partition("<!-- begin kv -->")
    rows = [line.strip("| ").split(" | ") for line in page.partition("<!-- end kv -->")[0].strip().splitlines()[2:]]
    assert len(rows) > 5
    for _, layers, heads, head_dim, of_token, of_4k, of_32k in rows:
        size = Geometry(int(layers), int(heads), int(head_dim), context_len=1).token_bytes(2)
        assert of_token == f"{size:,} B"
        assert (of_4k, of_32k) == (f"{size * 4096 // 2**20:,} MiB", f"{size * 32768 // 2**20:,} MiB")


def test_every_alert_has_its_line_and_no_other_is_named() -> None:
    rules = (ROOT / "deploy" / "alerts.yml").read_text()
    named = re.findall(r"^ *- alert: (\w+)$", rules, re.MULTILINE)
    assert len(named) > 10
    assert set(re.findall(r"`(Prelay[A-Z]\w+)`", OPERATIONS.read_text())) == set(named)


def test_the_tables_of_the_page_of_metrics_are_those_of_the_code() -> None:
    text = metrics.PAGE.read_text()
    assert metrics.page(text) == text, "run python scripts/metrics.py"
    for name, metric in TABLE.items():
        assert f"\n| `{name}` | {metric.kind} | " in text
