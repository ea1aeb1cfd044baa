"""One frame of `prelay top`: an overview as text, for a terminal of any width. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from .rates import Rates
from .words import clock, count, duration, plural, size

Overview = Mapping[str, Any]

#: Columns from which on there is room for names and bars in full.
WIDE = 110
_STATES = {"ready": "green", "draining": "yellow"}
_CLASSES = ("interactive", "normal", "batch")


def frame(overview: Overview, rates: Rates, url: str, width: int, height: int | None = None) -> RenderableType:
    """What fits into `height` lines, None: everything. What is cut are workers, and then restarts."""
    workers = sorted(overview["workers"], key=lambda worker: (worker["role"], worker["id"]))
    room = max(1, height - 12) if height else len(workers)
    shown = workers[:room]
    more = [Text(f"… and {plural(len(workers) - room, 'worker')} more", style="dim")] if len(workers) > room else []
    left = max(1, height - 11 - len(shown) - len(more)) if height else len(overview["restarts"])
    return Group(
        _title(overview, rates, url),
        Text(),
        _workers(shown, rates, width),
        *more,
        Text(),
        _queues(overview["queues"]),
        Text(),
        _restarts(overview["restarts"][:left], width),
    )


def unreachable(url: str, why: str) -> RenderableType:
    """The frame of a server that does not answer."""
    return Group(Text(f"prelay top · {url}", style="bold"), Text(), Text(why, style="red"), Text("trying again …"))


def _title(overview: Overview, rates: Rates, url: str) -> RenderableType:
    workers, jobs, server = overview["workers"], overview["jobs"], overview["server"]
    answers = rates.total(workers, "decode", "unified")
    prompts = rates.total(workers, "prefill")
    memory = size(server["used_memory"]) + (f" of {size(server['max_memory'])}" if server["max_memory"] else "")
    first = Text.assemble(
        ("prelay top", "bold"), f" · {url} · {clock(overview['now_ms'])} · ",
        (f"{count(answers)} tok/s", "bold cyan"), " answers" + (f", {count(prompts)} prompts" if prompts else ""),
    )  # fmt: skip
    dead = overview["dead_letters"]
    second = Text.assemble(
        f"{jobs['queued']} queued · {jobs['held']} in workers",
        f" · {jobs['preempted']} preempted" if jobs["preempted"] else "",
        f" · open batches: {overview['batches']}" if overview["batches"] else "",
        " · ", (plural(dead, "dead letter"), "red" if dead else ""), f" · Redis {memory}",
    )  # fmt: skip
    for line in (first, second):
        line.no_wrap, line.overflow = True, "ellipsis"
    return Group(first, second)


def _workers(workers: Sequence[Mapping[str, Any]], rates: Rates, width: int) -> RenderableType:
    if not workers:
        return Text("no worker has a heartbeat", style="red")
    table = _table("worker")
    for name in ("role", "state"):
        table.add_column(name, no_wrap=True)
    for name in ("runs", "waits", "KV blocks", "tok/s", "beat"):
        table.add_column(name, justify="right", no_wrap=True)
    for worker in workers:
        state = "stale" if worker["stale"] else worker["state"]
        rate = rates.of(worker["id"])
        table.add_row(
            _short(worker["id"], 40 if width >= WIDE else 22),
            worker["role"],
            Text(state, style=_STATES.get(state, "red")),
            str(worker["running"]),
            str(worker["waiting"]),
            _pool(worker["kv"], wide=width >= WIDE),
            "–" if rate is None else count(rate),
            f"{worker['age_ms'] / 1000:.1f} s",
        )
    return table


def _pool(kv: Mapping[str, int], *, wide: bool) -> Text:
    """Blocks that are taken, of all; what is cached is free for the asking. An orphaned one is a fault."""
    used, total = kv["leased"] + kv["copying"], max(1, kv["total"])
    share = used / total
    style = "red" if share > 0.95 else "yellow" if share > 0.8 else ""
    words = Text(f"{count(used)}/{count(kv['total'])}", style=style)
    if kv["orphaned"]:
        words.append(f" {kv['orphaned']} orphaned", style="bold red")
    if not wide:
        return words
    full = round(share * 12)
    cached = f"  {count(kv['cached'])} cached" if kv["cached"] else ""
    return Text.assemble(("█" * full, style or "cyan"), ("░" * (12 - full), "dim"), " ", words, (cached, "dim"))


def _queues(queues: Sequence[Mapping[str, Any]]) -> RenderableType:
    """A row for each stage, a column for each class: how many wait, and since when the first of them."""
    table = _table("waits for")
    for name in _CLASSES:
        table.add_column(name, justify="right", no_wrap=True)
    cells = {(each["stage"], each["priority"]): each for each in queues}
    for stage in ("prefill", "decode"):
        table.add_row(stage, *(_waiting(cells.get((stage, name))) for name in _CLASSES))
    return table


def _waiting(cell: Mapping[str, Any] | None) -> Text:
    if cell is None or not cell["waiting"]:
        return Text("0", style="dim")
    return Text(f"{cell['waiting']} ({duration(cell['oldest_ms'])})")


def _restarts(restarts: Sequence[Mapping[str, Any]], width: int) -> RenderableType:
    if not restarts:
        return Text("no attempt was given up lately", style="dim")
    wide = width >= WIDE
    table = _table("given up")
    table.add_column("job", no_wrap=True)
    table.add_column("epoch", justify="right", no_wrap=True)
    table.add_column("why", no_wrap=True)
    table.add_column("lost", justify="right", no_wrap=True)
    table.add_column("by", no_wrap=True)
    for each in restarts:
        table.add_row(
            clock(each["ms"]),
            _short(each["job"], 44 if wide else 20),
            str(each["epoch"]),
            each["why"] or each["state"],
            str(each["lost"]),
            _short(each["worker"] or "–", 30 if wide else 16),
        )
    return table


def _table(first: str) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold dim")
    table.add_column(first, no_wrap=True)
    return table


def _short(name: str, most: int) -> str:
    """Cut in the middle: jobs differ at the end, workers too."""
    if len(name) <= most:
        return name
    head = (most - 1) // 2
    return f"{name[:head]}…{name[len(name) - (most - 1 - head) :]}"
