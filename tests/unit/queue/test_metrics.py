"""Metrics of one process, and of several that share a folder: real processes, killed ones too."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from prelay_queue.metric_table import TABLE, Kind, Part
from prelay_queue.metrics import FOLDER, PLACE, Metrics


def values_of(text: str, name: str) -> dict[tuple[str, ...], float]:
    """The samples of a name, by the values of their labels."""
    families = text_string_to_metric_families(text)
    return {
        tuple(sample.labels.values()): sample.value
        for family in families
        for sample in family.samples
        if sample.name == name
    }


def test_counters_are_there_before_anything_is_counted() -> None:
    found = values_of(Metrics(Part.WORKER).text().decode(), "prelay_preemptions_total")
    assert set(found) == {(cause,) for cause in TABLE["prelay_preemptions_total"].labels["cause"]}
    assert set(found.values()) == {0}


def test_label_values_that_nobody_listed_are_one_other() -> None:
    metrics = Metrics(Part.WORKER)
    for number in range(1000):
        metrics.inc("prelay_preemptions_total", f"cause {number}")
    assert values_of(metrics.text().decode(), "prelay_preemptions_total")["other",] == 1000


@pytest.mark.parametrize("labels", [(), ("a", "b")])
def test_a_mistake_in_recording_is_nobody_s_error(labels: tuple[str, ...]) -> None:
    metrics = Metrics(Part.WORKER)
    metrics.inc("prelay_nothing_total", *labels)
    metrics.inc("prelay_preemptions_total", *labels)
    metrics.inc("prelay_preemptions_total", "kv", by=-1)
    metrics.observe("prelay_preemptions_total", 1.0, "kv")
    metrics.observe("prelay_request_queue_time_seconds", 1.0, *labels)
    metrics.set("prelay_nothing", 1)
    assert values_of(metrics.text().decode(), "prelay_preemptions_total")["kv",] == 0


def test_a_time_below_zero_counts_as_none() -> None:
    metrics = Metrics(Part.WORKER)
    metrics.observe("prelay_request_queue_time_seconds", -0.1, "normal")
    assert values_of(metrics.text().decode(), "prelay_request_queue_time_seconds_sum") == {("normal",): 0}


def test_names_tell_their_kinds_and_units() -> None:
    for name, metric in TABLE.items():
        assert name.startswith("prelay_")
        assert name.endswith("_total") == (metric.kind is Kind.COUNTER)
        assert name.endswith("_seconds") == (bool(metric.buckets) or name.endswith("_age_seconds"))
        assert metric.kind is not Kind.COUNTER or all(metric.labels.values())
        assert len(metric.help) < 100


WORK = """
import os, signal, sys
from prelay_queue.metric_table import Part
from prelay_queue.metrics import Metrics
metrics = Metrics(Part.WORKER, Part.API)
metrics.inc("prelay_preemptions_total", "kv", by=int(sys.argv[1]))
metrics.observe("prelay_request_queue_time_seconds", 0.2, "normal")
metrics.set("prelay_open_requests", 5)
if len(sys.argv) > 2:
    os.kill(os.getpid(), signal.SIGKILL)
"""


def work(folder: Path, place: str, *arguments: str) -> int:
    variables = {**os.environ, FOLDER: str(folder), PLACE: place}
    return subprocess.run([sys.executable, "-c", WORK, *arguments], env=variables, check=False, timeout=60).returncode


def shown(folder: Path) -> str:
    """What a process of another place shows."""
    code = "import sys; from prelay_queue.metrics import Metrics; sys.stdout.buffer.write(Metrics().text())"
    variables = {**os.environ, FOLDER: str(folder), PLACE: "looks"}
    done = subprocess.run([sys.executable, "-c", code], env=variables, check=True, capture_output=True, timeout=60)
    return done.stdout.decode()


def test_who_is_started_anew_in_a_place_goes_on_from_its_values(tmp_path: Path) -> None:
    assert work(tmp_path, "decode-0", "3", "die") == -signal.SIGKILL
    assert work(tmp_path, "decode-1", "10") == 0
    assert values_of(shown(tmp_path), "prelay_preemptions_total")["kv",] == 13
    assert work(tmp_path, "decode-0", "4", "die") == -signal.SIGKILL
    text = shown(tmp_path)
    assert values_of(text, "prelay_preemptions_total")["kv",] == 17
    assert values_of(text, "prelay_request_queue_time_seconds_count") == {("normal",): 3}
    assert values_of(text, "prelay_open_requests") == {(): 10}  # of the two places, not of the three processes
    assert len(list(tmp_path.iterdir())) == 3 * 3


def test_where_the_folder_has_no_room_the_process_keeps_its_own(tmp_path: Path) -> None:
    code = WORK + "print(metrics.text().decode())"
    variables = {**os.environ, FOLDER: str(tmp_path / "absent"), PLACE: "decode-0"}
    done = subprocess.run([sys.executable, "-c", code, "3"], env=variables, check=True, capture_output=True, timeout=60)
    assert values_of(done.stdout.decode(), "prelay_preemptions_total")["kv",] == 3
    assert b"not shown" in done.stderr
