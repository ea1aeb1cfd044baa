"""One request over its epochs, as text: what `prelay trace` shows. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from .words import clock, duration, plural

#: What a state means to somebody who waits.
_MEANING = {
    "queued": "waits for prefill",
    "prefill": "prompt is computed",
    "staged": "waits for decode",
    "adopting": "KV is copied",
    "decode": "answers",
    "preempted": "given up",
    "done": "over",
}
_STYLES = {"preempted": "yellow", "done": "bold", "queued": "cyan"}

Step = Mapping[str, Any]


def timeline(request: Mapping[str, Any]) -> RenderableType:
    """All choices of a request as /admin/jobs/{id} answers them."""
    parts: list[RenderableType] = []
    for choice in request["choices"]:
        if parts:
            parts.append(Text())
        parts += [_title(request["id"], choice), _table(choice["history"]), Text(_sum(choice), style="dim")]
    return Group(*parts)


def _title(request_id: str, choice: Mapping[str, Any]) -> Text:
    prompt, answer = plural(choice["prompt_tokens"], "prompt token"), f"{choice['tokens']}/{choice['max_tokens']}"
    what = f"  {clock(choice['submitted_ms'])} {choice['priority']}, {prompt}, {answer} of answer"
    return Text.assemble((f"{request_id}/{choice['index']}", "bold"), what)


def _table(history: list[Step]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("after", justify="right", no_wrap=True)
    table.add_column("epoch", justify="right")
    table.add_column("state", no_wrap=True)
    table.add_column("tokens", justify="right")
    table.add_column("worker", overflow="fold")
    table.add_column("", overflow="fold")
    first_ms = history[0]["ms"] if history else 0
    for step, words in _explained(history):
        table.add_row(
            f"+{duration(step['ms'] - first_ms)}",
            str(step["epoch"]),
            Text(step["state"], style=_STYLES.get(step["state"], "")),
            str(step["tokens"]),
            step["worker"] or "–",
            words,
        )
    return table


def _explained(history: list[Step]) -> Iterator[tuple[Step, str]]:
    """Each step with what it means; a restart says what became of the tokens."""
    before: Step | None = None
    for step in history:
        words = _MEANING.get(step["state"], "")
        if step["why"]:
            words += f": {step['why']}"
        if before is not None and step["state"] == "queued":
            lost = max(0, before["tokens"] - step["tokens"])
            words += f"; {plural(step['tokens'], 'token')} kept" + (f", {lost} discarded" if lost else "")
        yield step, words
        before = step


def _sum(choice: Mapping[str, Any]) -> str:
    """Where its time went."""
    history = choice["history"]
    if not history:
        return "no history is kept of it: it was submitted by an older version"
    spent: dict[str, int] = {}
    for step, following in pairwise(history):
        spent[step["state"]] = spent.get(step["state"], 0) + following["ms"] - step["ms"]
    shares = ", ".join(f"{state} {duration(ms)}" for state, ms in spent.items())
    restarts = sum(step["state"] == "queued" for step in history[1:])
    ends = "" if choice["finish_reason"] is None else f"; ended: {choice['finish_reason']}"
    return f"{plural(restarts, 'restart')}; {shares or 'just submitted'}{ends}"
