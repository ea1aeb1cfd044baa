"""Pages that are made from code say what the code says."""

from __future__ import annotations

import pytest

from prelay_queue.metric_table import TABLE
from prelay_text.effects import effect_of
from prelay_text.parameters import Route, parameters_of
from scripts import compatibility, metrics


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


def test_the_tables_of_the_page_of_metrics_are_those_of_the_code() -> None:
    text = metrics.PAGE.read_text()
    assert metrics.page(text) == text, "run python scripts/metrics.py"
    for name, metric in TABLE.items():
        assert f"\n| `{name}` | {metric.kind} | " in text
