"""Write the tables of docs/openai-compatibility.md from the one table of parameters.

python scripts/compatibility.py            # after a change of prelay_text/parameters.py, effects.py or refusals.py
python scripts/compatibility.py --check    # exit code 1 where the page says something else

What stands between `<!-- NAME -->` and `<!-- end -->` is generated; the rest of the page is written by hand.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from prelay_text.effects import effect_of
from prelay_text.errors import RequestError
from prelay_text.parameters import PARAMETERS, Parameter, Route, parameters_of

PAGE = Path(__file__).parents[1] / "docs" / "openai-compatibility.md"
ROUTES = (Route.COMPLETION, Route.CHAT)
_PART = re.compile(r"(<!-- (?P<name>[a-z]+) -->\n).*?(<!-- end -->)", re.DOTALL)
#: What no check takes, so that its refusal says what it takes.
_NOTHING = object()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="change nothing; say whether the page is up to date")
    args = parser.parse_args()
    old = PAGE.read_text()
    new = page(old)
    if args.check and new != old:
        print(f"{PAGE} is not what its tables come from: run python scripts/compatibility.py", file=sys.stderr)
        return 1
    if new != old:
        PAGE.write_text(new)
    return 0


def page(text: str) -> str:
    """The page with its tables as they should be. Raise KeyError for a table that nobody makes."""
    tables = {"served": served, "refused": refused}
    return _PART.sub(lambda part: part[1] + tables[part["name"]]() + part[3], text)


def served() -> str:
    rows = _same_rows({route: [row for row in _rows(route) if row.check] for route in ROUTES}, _told)
    return _table(("parameter", "route", "value", "default", "effect"), rows)


def refused() -> str:
    rows = _same_rows({route: [row for row in _rows(route) if not row.check] for route in ROUTES}, _refusal)
    return _table(("parameter", "route", "reason", "taken all the same"), rows)


def _rows(route: Route) -> Iterable[Parameter]:
    return parameters_of(route).values()


def _told(row: Parameter, route: Route) -> tuple[str, ...]:
    default = "required" if row.required else _json(row.default)
    return _wanted(row), default, effect_of(row, route)


def _refusal(row: Parameter, _: Route) -> tuple[str, ...]:
    return row.refusal.removeprefix("is not implemented: "), ", ".join(["null", *map(json.dumps, row.neutral)])


def _same_rows(
    of_routes: Mapping[Route, Iterable[Parameter]], cells: Callable[[Parameter, Route], tuple[str, ...]]
) -> Iterable[tuple[str, ...]]:
    """A line for each parameter, and one for each route where they differ."""
    lines: dict[tuple[str, ...], list[Route]] = {}
    for route, rows in of_routes.items():
        for row in rows:
            lines.setdefault((row.name, *cells(row, route)), []).append(route)
    names = [row.name for row in PARAMETERS]
    for (name, *rest), routes in sorted(lines.items(), key=lambda line: names.index(line[0][0])):
        yield f"`{name}`", _routes(routes), *rest


def _routes(routes: list[Route]) -> str:
    return "both" if len(routes) > 1 else {Route.COMPLETION: "completions", Route.CHAT: "chat"}[routes[0]]


def _wanted(row: Parameter) -> str:
    """What the parameter takes, in the words of its check."""
    assert row.check is not None
    try:
        row.check(row.name, _NOTHING)
    except RequestError as error:
        message = error.message
    found = re.fullmatch(rf"{row.name} must be (.*), not object .*", message)
    assert found, message
    return found[1]


def _json(default: object) -> str:
    """A default as JSON; none where it says nothing."""
    says = isinstance(default, str | int | float) or (isinstance(default, tuple | Mapping) and default)
    return json.dumps(default) if says else ""


def _table(heads: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [heads, ("---",) * len(heads), *rows]
    return "".join(f"| {' | '.join(map(_cell, line))} |\n" for line in lines)


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__":
    sys.exit(main())
