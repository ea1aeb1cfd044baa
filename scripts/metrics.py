"""Write the tables of docs/metrics.md anew from the table of metrics. A test says when that is needed."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

from prelay_queue.metric_table import TABLE, Metric, Part

PAGE = Path(__file__).parents[1] / "docs" / "metrics.md"

#: The tables of the page, by the names of their marks, and whose metrics they show.
_TABLES: Mapping[str, tuple[Part, ...]] = {
    "api": (Part.API,),
    "worker": (Part.WORKER,),
    "every": (Part.EVERY,),
    "supervisor": (Part.SUPERVISOR,),
    "scrape": (Part.SCRAPE,),
}
_HEADS = ("name", "kind", "labels", "meaning", "in vLLM")


def page(text: str) -> str:
    """The page with its tables as they should be."""
    for mark, parts in _TABLES.items():
        table = _table(metric for metric in TABLE.values() if metric.part in parts)
        before, begin, rest = text.partition(f"<!-- begin {mark} -->\n")
        _, end, after = rest.partition(f"<!-- end {mark} -->")
        if not (begin and end):
            raise ValueError(f"docs/metrics.md has no marks of {mark}")
        text = before + begin + table + end + after
    return text


def _table(metrics: Iterable[Metric]) -> str:
    lines = [_HEADS, ("---",) * len(_HEADS), *map(_row, metrics)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _row(metric: Metric) -> tuple[str, ...]:
    labels = "; ".join(f"{name}: {', '.join(values)}" if values else name for name, values in metric.labels.items())
    vllm = f"`{metric.vllm}`" if metric.vllm else ""
    return f"`{metric.name}`", metric.kind, labels, metric.help.replace("|", "\\|"), vllm


def main() -> int:
    PAGE.write_text(page(PAGE.read_text()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
