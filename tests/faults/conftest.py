"""Servers for fault tests: real processes are killed here, and every token is checked.

How many were checked is said at the end of the run, and kept in pytest's cache (faults/tally-<process of the run>).
"""

from __future__ import annotations

import pytest

from tests.bed.servers import any_server, own_server, shared_server
from tests.faults import tally

#: Their asserts say what they compared, as those of tests do.
pytest.register_assert_rewrite(*(f"tests.faults.{name}" for name in ("fleet", "matrix", "traffic", "web")))

__all__ = ["any_server", "own_server", "shared_server"]


def pytest_sessionfinish(session: pytest.Session) -> None:
    worker = getattr(session.config, "workerinput", {}).get("workerid", "main")
    cache = getattr(session.config, "cache", None)  # -p no:cacheprovider: there is none
    if cache is not None and tally.counts()["cases"]:
        cache.set(f"faults/tally-{worker}", tally.counts())


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    counts = tally.counts()
    if counts["cases"]:
        words = f"fault cases that ended well: {counts['cases']}, tokens checked in them: {counts['tokens']}"
        terminalreporter.write_line(words)
