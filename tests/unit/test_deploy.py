"""What Prometheus and Grafana are given fits the metrics that there are."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from prelay_queue.metric_table import TABLE
from scripts import dashboard

DEPLOY = Path(__file__).parents[2] / "deploy"
#: A metric and what its labels must be.
USE = re.compile(r"(prelay_[a-z0-9_]+)(?:\{([^}]*)\})?")
MATCHER = re.compile(r'(\w+)\s*(?:=~|!~|!=|=)\s*"([^"]*)"')
#: Names that aggregations and legends go by.
BY = re.compile(r"\bby \(([\w, ]+)\)")


def expressions() -> Iterator[str]:
    """Every expression of the alerts and of the dashboard."""
    alerts = (DEPLOY / "alerts.yml").read_text()
    found = re.findall(r"^ +expr: (?:>-\n)?(.*?)\n +(?:for|labels):", alerts, flags=re.MULTILINE | re.DOTALL)
    assert len(found) == alerts.count("alert:") > 10
    yield from found
    for panel in json.loads(dashboard.FILE.read_text())["panels"]:
        yield from (target["expr"] for target in panel.get("targets", ()))


def bare(name: str) -> str:
    """The metric that a series is of."""
    return name if name in TABLE else re.sub(r"_(bucket|sum|count)$", "", name)


@pytest.mark.parametrize("expression", sorted(set(expressions())))
def test_an_expression_asks_for_metrics_labels_and_values_that_there_are(expression: str) -> None:
    used = USE.findall(expression)
    assert used or 'up{job="prelay"}' in expression
    for name, matchers in used:
        metric = TABLE[bare(name)]
        assert (name != metric.name) == bool(metric.buckets), f"{name} is no series"
        for label, wanted in MATCHER.findall(matchers):
            values = metric.labels[label]
            assert not values or set(wanted.split("|")) <= set(values), f"{label} is never {wanted}"
    known = {"le"}.union(*(TABLE[bare(name)].labels for name, _ in used))
    for names in BY.findall(expression):
        assert set(re.split(r", ?", names)) <= known


def test_the_dashboard_is_what_its_script_draws_and_shows_every_metric() -> None:
    assert dashboard.FILE.read_text() == dashboard.text(), "run python scripts/dashboard.py"
    text = " ".join(expressions())
    assert [name for name in TABLE if name not in text] == []


def test_the_panels_of_the_dashboard_do_not_overlap() -> None:
    taken: set[tuple[int, int]] = set()
    panels = json.loads(dashboard.FILE.read_text())["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    for panel in panels:
        at = panel["gridPos"]
        cells = {(at["x"] + x, at["y"] + y) for x in range(at["w"]) for y in range(at["h"])}
        assert not cells & taken
        taken |= cells
    assert max(x for x, _ in taken) < 24


def promtool() -> str:
    found = shutil.which("promtool")
    if found is None and os.environ.get("CI"):
        pytest.fail("no promtool here (Debian: apt install prometheus)")
    if found is None:
        pytest.skip("no promtool here")
    return found


def run_promtool(*words: str | Path) -> None:
    done = subprocess.run([promtool(), *words], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


def test_promtool_takes_the_configuration_and_its_rules(tmp_path: Path) -> None:
    # It looks whether the files are there that are named; a container has the key at another place.
    text = (DEPLOY / "prometheus.yml").read_text()
    assert text.count("/run/secrets/api_key") == 1
    (tmp_path / "key").write_text("sk-4711")
    (tmp_path / "prometheus.yml").write_text(text.replace("/run/secrets/api_key", str(tmp_path / "key")))
    shutil.copy(DEPLOY / "alerts.yml", tmp_path)
    run_promtool("check", "config", tmp_path / "prometheus.yml")


Series = dict[str, str]

#: Of two API processes, a value a minute as promtool writes them: a state of batches, or of their lines. Then the alert
#: that stands after 50 minutes, and whether it does after 20.
BATCHES: dict[str, tuple[Series, str, bool]] = {
    "nobody runs what waits": (
        {"waiting": "2x60", "running": "0x60", "completed": "5x60"}, "PrelayNoBatchRunner", True,
    ),
    "one runs and one waits": ({"waiting": "1x60", "running": "1x60", "completed": "0+1x60"}, "", False),
    "no line ends": ({"waiting": "0x60", "running": "1x60", "completed": "5x60"}, "PrelayBatchStands", False),
    "a line ends every ten minutes": (
        {"waiting": "0x60", "running": "1x60", "completed": " ".join(f"{n}x9" for n in range(6))}, "", False,
    ),
    "none is open": ({"waiting": "0x60", "running": "0x60", "completed": "0x60"}, "", False),
}  # fmt: skip


@pytest.mark.parametrize("case", BATCHES)
def test_the_alerts_of_batches_stand_when_they_should_and_only_then(case: str, tmp_path: Path) -> None:
    values, wanted, early = BATCHES[case]
    series = [
        {"series": f'prelay_batch{"_lines" if state == "completed" else "es"}{{state="{state}",instance="{api}"}}',
         "values": text}
        for state, text in values.items()
        for api in ("a", "b")
    ]  # fmt: skip
    names = ("PrelayNoBatchRunner", "PrelayBatchStands")
    alert_rule_test = [
        {"eval_time": at, "alertname": name, "exp_alerts": [{"exp_labels": {"severity": "ticket"}}] if stands else []}
        for name in names
        for at, stands in (("20m", name == wanted and early), ("50m", name == wanted))
    ]
    tests = [{"interval": "1m", "input_series": series, "alert_rule_test": alert_rule_test}]
    rules = (DEPLOY / "alerts.yml").read_text()
    # the words of annotations are no part of what is compared here
    rules = re.sub(r"^ +(annotations:|summary:.*|action:.*)\n", "", rules, flags=re.MULTILINE)
    (tmp_path / "alerts.yml").write_text(rules)
    whole = {"rule_files": ["alerts.yml"], "evaluation_interval": "1m", "tests": tests}
    (tmp_path / "test.yml").write_text(json.dumps(whole))
    run_promtool("test", "rules", tmp_path / "test.yml")
