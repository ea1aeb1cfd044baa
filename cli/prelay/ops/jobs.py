"""`prelay jobs` and `prelay trace`: requests that are under way, and one of them closely."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import orjson
from rich.console import Console, RenderableType
from rich.table import Table

from ..errors import CliError
from .screen import screen
from .server import AdminServer, Refused
from .timeline import timeline
from .words import clock, count, duration, plural

#: Columns from which on there is room for everything about a job in its line.
WIDE = 105


def print_json(found: Any) -> None:
    print(orjson.dumps(found, option=orjson.OPT_INDENT_2).decode())


def show_list(server: AdminServer, wanted: Mapping[str, str | int], *, json: bool) -> int:
    """Print the jobs that are not over, the oldest first."""
    console = screen()
    now_ms, found = server.overview()["now_ms"], server.jobs(wanted)
    if json:
        print_json(found)
        return 0
    if found["jobs"]:
        console.print(job_table(found["jobs"], now_ms, wide=console.width >= WIDE))
    left = found["matching"] - len(found["jobs"])
    more = f", {left} more (--limit)" if left > 0 else ""
    partly = "" if found["whole"] else "; not all jobs were looked at"
    console.print(f"{plural(len(found['jobs']), 'job')}{more}{partly}", style="dim")
    return 0


def job_table(jobs: Sequence[Mapping[str, Any]], now_ms: int, *, wide: bool) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    columns = {name: show for name, (show, only_wide) in _columns(now_ms).items() if wide or not only_wide}
    for name in columns:
        table.add_column(
            name, justify="right" if name in _NUMBERS else "left", no_wrap=name != "worker", overflow="fold"
        )
    for job in jobs:
        table.add_row(*(show(job) for show in columns.values()))
    return table


_NUMBERS = ("age", "prompt", "answer", "epoch")


def _columns(now_ms: int) -> dict[str, tuple[Callable[[Mapping[str, Any]], str], bool]]:
    """What each column shows of a job, and whether only a wide terminal has it."""
    return {
        "job": (lambda job: job["id"], False),
        "state": (lambda job: job["state"], False),
        "class": (lambda job: job["priority"], True),
        "age": (lambda job: duration(max(0, now_ms - job["submitted_ms"])), False),
        "prompt": (lambda job: count(job["prompt_tokens"]), True),
        "answer": (lambda job: f"{job['tokens']}/{job['max_tokens']}", False),
        "epoch": (lambda job: str(job["epoch"]), True),
        "worker": (lambda job: job["owner"] or "–", False),
    }


def show_job(server: AdminServer, request_id: str, *, json: bool) -> int:
    """Print all that is known of a request. Never its text."""
    found = server.job(request_id)
    if json:
        print_json(found)
        return 0
    console = screen()
    for choice in found["choices"]:
        console.print(_facts(found["id"], choice))
    return 0


def _facts(request_id: str, choice: Mapping[str, Any]) -> RenderableType:
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    table.add_row("job", f"{request_id}/{choice['index']}")
    for name, value in choice.items():
        if name in ("index", "history"):
            continue
        shown = clock(value) if name.endswith("_ms") else "–" if value is None else str(value)
        table.add_row(name.removesuffix("_ms").replace("_", " "), shown)
    return table


def show_trace(server: AdminServer, request_id: str, *, json: bool) -> int:
    """Print the timeline of a request over its epochs."""
    found = server.job(request_id)
    if json:
        print_json(found)
    else:
        screen().print(timeline(found))
    return 0


def cancel(server: AdminServer, requests: Sequence[str]) -> int:
    """End requests. 1 if one of them is unknown; the others are ended all the same."""

    def one(request_id: str) -> str:
        ended = sum(choice["cancelled"] for choice in server.cancel(request_id)["choices"])
        return "cancelled" if ended else "was over already"

    return for_each(requests, one)


def preempt(server: AdminServer, requests: Sequence[str]) -> int:
    """Have the workers give requests up; they begin again behind the client's back."""

    def one(request_id: str) -> str:
        choices = server.preempt(request_id)["choices"]
        asked = sorted({choice["asked"] for choice in choices if choice["asked"]})
        states = sorted({choice["state"] for choice in choices})
        return f"asked {', '.join(asked)}" if asked else f"no worker runs it ({', '.join(states)})"

    return for_each(requests, one)


def for_each(names: Sequence[str], act: Callable[[str], str]) -> int:
    """Do it for each, and say how it went; what one of them lacks does not hold up the rest."""
    failed = 0
    for name in names:
        try:
            print(f"{name}: {act(name)}")
        except Refused as error:
            if error.status not in (404, 409):
                raise
            failed += 1
            Console(stderr=True, highlight=False).print(f"{name}: {error}", soft_wrap=True)
    if failed:
        raise CliError(f"{failed} of {len(names)} could not be done")
    return 0
