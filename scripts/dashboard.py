"""Write deploy/grafana/dashboards/prelay.json: the rows and panels below, laid out. A test says when that is needed."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FILE = Path(__file__).parents[1] / "deploy" / "grafana" / "dashboards" / "prelay.json"

#: Of 24 columns.
WIDTH, HEIGHT = 8, 8


@dataclass(frozen=True, slots=True)
class Panel:
    """Curves of expressions: (expression, legend) each. `unit` is Grafana's name of it."""

    title: str
    unit: str
    curves: Sequence[tuple[str, str]]
    stacked: bool = False


def _quantiles(metric: str, by: str = "class") -> list[tuple[str, str]]:
    rate = f"sum by (le, {by}) (rate({metric}_bucket[$__rate_interval]))"
    return [(f"histogram_quantile({q}, {rate})", f"p{q * 100:g} {{{{{by}}}}}") for q in (0.5, 0.95)]


def _means(stages: Sequence[str]) -> list[tuple[str, str]]:
    return [(_mean(f"prelay_request_{stage}_time_seconds"), stage) for stage in stages]


def _mean(metric: str) -> str:
    return f"sum(rate({metric}_sum[$__rate_interval])) / sum(rate({metric}_count[$__rate_interval]))"


def _rate(metric: str, by: str) -> tuple[str, str]:
    return f"sum by ({by}) (rate({metric}[$__rate_interval]))", f"{{{{{by}}}}}"


def _now(metric: str, *by: str) -> tuple[str, str]:
    """A figure that all API processes show alike."""
    return f"max by ({', '.join(by)}) ({metric})", " ".join(f"{{{{{name}}}}}" for name in by)


_STAGES = ("queue", "prefill", "handover", "decode_queue", "decode")

ROWS: dict[str, Sequence[Panel]] = {
    "What clients get": (
        Panel("Time to first token", "s", _quantiles("prelay_time_to_first_token_seconds")),
        Panel("Time per output token", "s", _quantiles("prelay_time_per_output_token_seconds")),
        Panel("Between tokens", "s", _quantiles("prelay_inter_token_latency_seconds")),
        Panel("End to end", "s", _quantiles("prelay_e2e_request_latency_seconds")),
        Panel("Requests by outcome", "reqps", [_rate("prelay_requests_total", "outcome")], stacked=True),
        Panel("Open requests", "short", [("sum(prelay_open_requests)", "open")]),
    ),
    "Where the time goes": (
        Panel("Mean of each stage", "s", _means(_STAGES), stacked=True),
        Panel("In the queue", "s", _quantiles("prelay_request_queue_time_seconds")),
        Panel("Decode queue", "s", _quantiles("prelay_request_decode_queue_time_seconds")),
    ),
    "Queues": (
        Panel("Waiting", "short", [_now("prelay_queue_depth", "class", "stage")], stacked=True),
        Panel("Age of the oldest", "s", [_now("prelay_queue_oldest_age_seconds", "class", "stage")]),
        Panel("Prompt tokens waiting", "short", [_now("prelay_queue_tokens", "class")], stacked=True),
        Panel("Jobs that are not over", "short", [_now("prelay_jobs", "state")], stacked=True),
        Panel("Open batches", "short", [("max(prelay_batches_open)", "all"), _now("prelay_batches", "state")]),
        Panel("Lines of open batches", "short", [_now("prelay_batch_lines", "state")]),
    ),
    "Workers": (
        Panel("Workers", "short", [_now("prelay_workers", "role", "state")], stacked=True),
        Panel("Running", "short", [_now("prelay_num_requests_running", "worker", "role")], stacked=True),
        Panel("Waiting for room", "short", [_now("prelay_num_requests_waiting", "worker", "role")], stacked=True),
        Panel("KV in use", "percentunit", [_now("prelay_kv_cache_usage_ratio", "worker", "role")]),
        Panel(
            "KV blocks",
            "short",
            [("sum by (state) (max by (worker, state) (prelay_kv_blocks))", "{{state}}")],
            stacked=True,
        ),
        Panel("KV blocks of each", "short", [_now("prelay_kv_blocks_limit", "worker", "role")]),
    ),
    "Tokens": (
        Panel(
            "Tokens",
            "short",
            [
                ("sum(rate(prelay_prompt_tokens_total[$__rate_interval]))", "prompts"),
                ("sum(rate(prelay_generation_tokens_total[$__rate_interval]))", "answers"),
                ("sum(rate(prelay_computed_tokens_total[$__rate_interval]))", "computed"),
            ],
        ),
        Panel(
            "Found in the prefix cache",
            "percentunit",
            [
                (
                    "sum(rate(prelay_prefix_cache_hits_total[$__rate_interval]))"
                    " / sum(rate(prelay_prefix_cache_queries_total[$__rate_interval]))",
                    "share",
                )
            ],
        ),
        Panel("Wasted tokens", "short", [_rate("prelay_wasted_tokens_total", "reason")], stacked=True),
    ),
    "Faults": (
        Panel("Preempts", "short", [_rate("prelay_preemptions_total", "cause")], stacked=True),
        Panel(
            "Begun again",
            "short",
            [
                ("sum(rate(prelay_requeues_total[$__rate_interval]))", "requeued by the API"),
                ("sum(rate(prelay_resubmits_total[$__rate_interval]))", "lost by Redis"),
                ("sum(rate(prelay_redeliveries_total[$__rate_interval]))", "redelivered"),
            ],
        ),
        Panel("Swept jobs", "short", [_rate("prelay_swept_jobs_total", "found")], stacked=True),
        Panel("Restarts", "short", [("sum by (role) (increase(prelay_restarts_total[5m]))", "{{role}}")], stacked=True),
        Panel("Fenced writes", "short", [_rate("prelay_fenced_writes_total", "write")], stacked=True),
        Panel("Dead letters", "short", [("max(prelay_dead_letters)", "dead letters")]),
    ),
    "Redis": (
        Panel("Round trips", "s", _quantiles("prelay_redis_command_seconds", "script")),
        Panel("Errors", "short", [_rate("prelay_redis_errors_total", "kind")], stacked=True),
        Panel(
            "Memory",
            "bytes",
            [("max(prelay_redis_memory_used_bytes)", "used"), ("max(prelay_redis_memory_limit_bytes)", "limit")],
        ),
        Panel("Answers", "short", [("min(prelay_redis_up)", "up")]),
        Panel("Versions", "short", [("count by (version) (prelay_build_info)", "{{version}}")]),
    ),
}


def dashboard() -> dict[str, Any]:
    """The dashboard as Grafana imports it."""
    panels: list[dict[str, Any]] = []
    top = 0
    for title, row in ROWS.items():
        at = {"h": 1, "w": 24, "x": 0, "y": top}
        panels.append({"id": len(panels) + 1, "type": "row", "title": title, "gridPos": at, "panels": []})
        for number, panel in enumerate(row):
            line, column = divmod(number, 24 // WIDTH)
            at = {"h": HEIGHT, "w": WIDTH, "x": column * WIDTH, "y": top + 1 + line * HEIGHT}
            panels.append(_drawn(panel, len(panels) + 1, at))
        top += 1 + -(-len(row) * WIDTH // 24) * HEIGHT
    return {
        "uid": "prelay",
        "title": "Prelay",
        "tags": ["prelay"],
        "schemaVersion": 39,
        "refresh": "15s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {"list": []},
        "panels": panels,
    }


def _drawn(panel: Panel, number: int, at: dict[str, int]) -> dict[str, Any]:
    stacking = {"mode": "normal" if panel.stacked else "none"}
    custom = {"fillOpacity": 20 if panel.stacked else 0, "showPoints": "never", "stacking": stacking}
    return {
        "id": number,
        "type": "timeseries",
        "title": panel.title,
        "gridPos": at,
        "datasource": {"type": "prometheus", "uid": "prometheus"},
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0, "custom": custom}, "overrides": []},
        "options": {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi"}},
        "targets": [
            {"refId": chr(ord("A") + n), "expr": expression, "legendFormat": legend}
            for n, (expression, legend) in enumerate(panel.curves)
        ],
    }


def text() -> str:
    """What the file should hold."""
    return json.dumps(dashboard(), indent=1) + "\n"


def main() -> int:
    FILE.write_text(text())
    return 0


if __name__ == "__main__":
    sys.exit(main())
