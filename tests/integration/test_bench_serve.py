"""`prelay bench serve` on an API process with null workers: its counts are the server's, and it leaves nothing."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from prelay_queue.client import SyncQueue
from prelay_queue.scripts import text
from prelay_worker.config import NullModel, Role
from tests.bed.bench import finish, report, start
from tests.bed.http import get
from tests.bed.processes import Api, Fleet, fleet, until, until_ready
from tests.bed.servers import Server

#: The null model's words; the default ids are those of real models.
IDS = ("--token-ids", "0-1000")


Jobs = Callable[[], list[dict[str, str]]]
_FIELDS = ("st", "nx", "pt", "fin")


@pytest.fixture(scope="module")
def served(shared_server: Server, null_folder: Path) -> Iterator[Fleet]:
    """A fleet that all these tests share: none of them breaks anything."""
    with fleet(shared_server.settings(), null_folder) as found:
        api = found.api()
        for role in (Role.PREFILL, Role.DECODE):
            found.worker(role, null=NullModel(step_ms=2))
        until_ready(api.url)
        yield found


@pytest.fixture
def url(served: Fleet) -> str:
    return next(process.url for process in served.processes if isinstance(process, Api))


@pytest.fixture
def jobs(served: Fleet) -> Iterator[Jobs]:
    """What the server keeps of each job of the test: the fields that `keys.py` describes."""
    queue = SyncQueue(served.queue)
    before = set(queue.redis.keys(queue.keys.job("*")))

    def look() -> list[dict[str, str]]:
        names = set(queue.redis.keys(queue.keys.job("*"))) - before
        rows = [queue.redis.hmget(name, _FIELDS) for name in names]
        return [{field: text(value) for field, value in zip(_FIELDS, row, strict=True) if value} for row in rows]

    yield look
    queue.close()


def test_a_closed_loop_counts_what_the_server_counts(url: str, jobs: Jobs) -> None:
    lengths = ("--input-len", "uniform:5-40", "--output-len", "uniform:2-30")
    found = report("serve", "--url", url, *IDS, *lengths, "--concurrency", "1,5", "--requests", "12", "--warmup", "3")
    assert [(level["concurrency"], level["ok"], level["failed"]) for level in found["levels"]] == [
        (1, 12, 0),
        (5, 12, 0),
    ]
    asked = jobs()
    assert {job["st"] for job in asked} == {"done"}
    assert len(asked) == 3 + 24  # the warm-up is asked, and not counted
    counted = {name: sum(level[f"tokens_{name}"] for level in found["levels"]) for name in ("in", "out")}
    sent = {"in": sum(int(job["pt"]) for job in asked), "out": sum(int(job["nx"]) for job in asked)}
    assert sent["in"] - 3 * 40 <= counted["in"] <= sent["in"] - 3 * 5
    assert sent["out"] - 3 * 30 <= counted["out"] <= sent["out"] - 3 * 2
    for level in found["levels"]:
        assert level["ttft_ms"]["p50"] <= level["e2e_ms"]["p50"]
        assert level["tpot_ms"]["p50"] > 0
        assert level["tokens_from"] == "usage"


def test_without_a_warm_up_the_counts_are_the_server_s_exactly(url: str, jobs: Jobs) -> None:
    found = report(
        "serve", "--url", url, *IDS, "--rate", "40", "--requests", "20", "--warmup", "0", "--output-len", "9"
    )
    (level,) = found["levels"]
    asked = jobs()
    assert (level["ok"], level["rate"], len(asked)) == (20, 40, 20)
    assert level["tokens_out"] == sum(int(job["nx"]) for job in asked) == 180
    assert level["tokens_in"] == sum(int(job["pt"]) for job in asked) == 20 * 128
    assert level["sent_late_ms"]["p99"] >= 0


def test_a_report_carries_mode_threads_exactness_and_code(url: str) -> None:
    args = ("--concurrency", "1", "--requests", "1", "--slo", "ttft=60000,tpot=60000", "--note", "disk=none")
    found = report("serve", "--url", url, *IDS, *args)
    assert {"commit", "cpu", "cores", "torch", "python", "load_at_start", "load_at_end"} <= found["facts"].keys()
    assert found["facts"]["notes"] == {"disk": "none"}
    server = found["server"]
    assert (server["model"], server["mode"], server["threads"]) == ("null", "disaggregated", "1")
    assert sorted(worker["role"] for worker in server["workers"]) == ["decode", "prefill"]
    assert all(worker["kv_blocks"] == 4096 and worker["block_size"] == 16 for worker in server["workers"])
    assert found["settings"]["slo"] == "ttft=60000,tpot=60000"
    assert found["levels"][0]["attainment"] == 1


def test_failures_are_counted_with_their_reason_and_the_rest_goes_on(url: str, tmp_path: Path) -> None:
    lines: list[dict[str, Any]] = [{"prompt": "t1 t2 t3", "output_len": 5}, {"prompt": [1, 999_999], "output_len": 5}]
    file = tmp_path / "asks.jsonl"
    file.write_text("\n".join(map(json.dumps, lines)))
    args = ("--dataset", str(file), "--concurrency", "2", "--requests", "6", "--warmup", "0", "--slo", "ttft=60000")
    (level,) = report("serve", "--url", url, *args)["levels"]
    assert (level["requests"], level["ok"], level["failed"], level["attainment"]) == (6, 3, 3, 0.5)
    ((why, times),) = level["failures"].items()
    assert why.startswith("status 400: ")
    assert times == 3
    assert level["tokens_out"] == 15


@pytest.mark.slow
def test_an_answer_that_takes_too_long_failed_and_is_cancelled(url: str, jobs: Jobs) -> None:
    args = ("--concurrency", "1", "--requests", "1", "--warmup", "0", "--output-len", "3900", "--timeout", "0.5")
    (level,) = report("serve", "--url", url, *IDS, *args)["levels"]
    assert level["failures"] == {"no end after 0.5 s": 1}
    until(lambda: [job["fin"] for job in jobs()] == ["cancelled"])


@pytest.mark.slow
def test_a_goodput_that_nothing_can_reach_is_zero_and_hopeless_rates_are_cut_short(url: str) -> None:
    goal = ("--find-goodput", "--slo", "ttft=0.001", "--rate", "64", "--requests", "8", "--output-len", "2")
    found = report("serve", "--url", url, *IDS, *goal, "--warmup", "0")
    assert found["goodput"]["requests_per_s"] == 0
    assert [level["rate"] for level in found["levels"]] == [64, 32, 16, 8, 4, 2, 1]
    assert all(level["attainment"] == 0 for level in found["levels"])
    assert found["levels"][-1]["requests"] < 8
    assert found["levels"][-1]["stopped_early"]


@pytest.mark.slow
def test_a_search_that_finds_no_end_says_so(url: str) -> None:
    goal = ("--find-goodput", "--slo", "ttft=60000,e2e=60000", "--rate", "512", "--requests", "4", "--output-len", "2")
    found = report("serve", "--url", url, *IDS, *goal, "--warmup", "0")
    rates = [level["rate"] for level in found["levels"]]
    assert rates == [512 * 2**n for n in range(11)]  # such targets are met at any rate: it says that it found no end
    assert found["goodput"] == {
        "requests_per_s": rates[-1], "attainment": 0.9, "slo_ms": {"ttft": 60_000, "e2e": 60_000}, "settled": False,
        "too_much": None,
    }  # fmt: skip


def test_ctrl_c_reports_what_was_measured_and_leaves_nothing_running(url: str, jobs: Jobs) -> None:
    load = ("--concurrency", "4", "--duration", "600", "--output-len", "100", "--warmup", "0")
    process = start("serve", "--url", url, *IDS, *load)

    def workers() -> list[dict[str, Any]]:
        return list(get(f"{url}/admin/workers").json()["workers"])

    until(lambda: sum(job["st"] == "done" for job in jobs()) >= 4 and any(w["running"] for w in workers()), 30)
    process.send_signal(signal.SIGINT)
    code, out, err = finish(process, 20)
    assert code == 130, err
    assert "(interrupted: what was measured until then)" in out
    assert "TTFT" in out
    assert "Traceback" not in err
    until(lambda: all(w["kv"]["free"] == w["kv"]["total"] and not w["running"] for w in workers()))
    ends = [job["fin"] for job in jobs()]
    assert set(ends) == {"length", "cancelled"}
    assert ends.count("cancelled") <= 4


def test_a_dead_url_is_one_line() -> None:
    code, out, err = finish(start("serve", "--url", "http://127.0.0.1:1"))
    assert (code, out) == (1, "")
    *_, last = err.strip().splitlines()
    assert last.startswith("prelay: no server answers at http://127.0.0.1:1")
    assert "Traceback" not in err
