"""What operators are shown: frames, timelines, rates and figures. Pure."""

from __future__ import annotations

from typing import Any

import pytest
from rich.console import Console, RenderableType

from prelay.errors import BadUsage
from prelay.ops.drain import named
from prelay.ops.frame import frame
from prelay.ops.jobs import job_table
from prelay.ops.rates import Rates
from prelay.ops.server import request_of
from prelay.ops.timeline import timeline
from prelay.ops.words import count, duration, size


def drawn(what: RenderableType, width: int) -> list[str]:
    console = Console(width=width, color_system=None)
    with console.capture() as captured:
        console.print(what)
    return captured.get().splitlines()


def worker(number: int, role: str = "decode", **changes: Any) -> dict[str, Any]:
    kv = {"total": 1000, "free": 300, "copying": 10, "leased": 590, "cached": 100, "orphaned": 0}
    about = {"id": f"host-{number}:471{number}:0123abcd", "role": role, "pid": 4710 + number, "state": "ready"}
    stand = {"running": 3, "waiting": 1, "kv": kv, "computed_tokens": 0, "t": 0, "age_ms": 400, "stale": False}
    return about | stand | changes


def overview(workers: int = 3, restarts: int = 5, **changes: Any) -> dict[str, Any]:
    restart = {"ms": 1, "job": "cmpl-" + "0" * 24 + "/0", "epoch": 1, "state": "preempted", "worker": "w", "why": "kv"}
    return {
        "now_ms": 1, "server": {"used_memory": 3_500_000, "max_memory": 2_000_000_000}, "batches": 0, "dead_letters": 0,
        "jobs": {"queued": 4, "held": 9, "preempted": 0},
        "queues": [{"stage": "prefill", "priority": "normal", "waiting": 4, "oldest_ms": 2_300}],
        "workers": [worker(number) for number in range(workers)],
        "restarts": [{**restart, "lost": number} for number in range(restarts)], **changes,
    }  # fmt: skip


@pytest.mark.parametrize("width", [80, 120, 200])
@pytest.mark.parametrize("workers", [0, 1, 3, 100])
@pytest.mark.parametrize("height", [16, 24, 50])
def test_a_frame_fits_its_terminal(width: int, workers: int, height: int) -> None:
    lines = drawn(frame(overview(workers, 20), Rates(), "http://server:8000", width, height), width)
    assert len(lines) <= height
    assert max(map(len, lines)) <= width
    assert any(line.startswith("prefill") and "4 (2.3 s)" in line for line in lines)
    assert sum("cmpl-" in line for line in lines) >= 1
    if workers == 100:
        assert any("workers more" in line for line in lines)


def test_a_frame_says_what_is_wrong() -> None:
    broken = worker(0, state="draining", stale=True, kv=worker(0)["kv"] | {"orphaned": 2})
    lines = drawn(frame(overview(workers=0) | {"workers": [broken], "dead_letters": 1}, Rates(), "u", 120), 120)
    text = "\n".join(lines)
    assert "stale" in text
    assert "2 orphaned" in text
    assert "1 dead letter ·" in text
    assert "no worker has a heartbeat" in "\n".join(drawn(frame(overview(0), Rates(), "u", 80), 80))


def test_rates_come_from_two_heartbeats_and_stay_until_the_next() -> None:
    rates, one = Rates(), worker(0)
    rates.look([one | {"t": 1000, "computed_tokens": 50}])
    assert rates.of(one["id"]) is None
    rates.look([one | {"t": 1500, "computed_tokens": 150}, worker(1, t=1500)])
    assert rates.of(one["id"]) == 200
    rates.look([one | {"t": 1500, "computed_tokens": 150}])  # the same heartbeat again
    assert rates.of(one["id"]) == 200
    assert rates.total([one], "decode") == 200
    assert rates.total([one], "prefill") == 0
    rates.look([])
    assert rates.of(one["id"]) is None


def request(*history: tuple[int, str, int, int, str | None, str | None]) -> dict[str, Any]:
    names = ("ms", "state", "epoch", "tokens", "worker", "why")
    steps = [dict(zip(names, step, strict=True)) for step in history]
    choice = {"index": 0, "priority": "normal", "prompt_tokens": 3, "tokens": 40, "max_tokens": 99, "submitted_ms": 1}
    return {"id": "cmpl-1", "choices": [{**choice, "finish_reason": "length", "history": steps}]}


def test_a_timeline_tells_what_became_of_the_tokens() -> None:
    told = request(
        (1000, "queued", 1, 0, None, None), (1010, "prefill", 1, 0, "p", None), (1500, "decode", 1, 1, "d", None),
        (4500, "preempted", 1, 40, "d", "kv"), (4510, "queued", 2, 36, None, None),
        (9000, "done", 2, 40, "d", "length"),
    )  # fmt: skip
    assert max(map(len, drawn(timeline(told), 80))) <= 80
    text = "\n".join(" ".join(line.split()) for line in drawn(timeline(told), 100))
    assert "+3.5 s 1 preempted 40 d given up: kv" in text
    assert "+3.5 s 2 queued 36 – waits for prefill; 36 tokens kept, 4 discarded" in text
    assert "1 restart; queued 4.5 s, prefill 490 ms, decode 3.0 s, preempted 10 ms; ended: length" in text


def test_a_timeline_of_a_job_without_history_says_so() -> None:
    assert "no history is kept of it" in "\n".join(drawn(timeline(request()), 80))


def test_a_narrow_list_of_jobs_keeps_ids_whole() -> None:
    words = {"id": "chatcmpl-0123456789abcdef01234567/0", "state": "adopting", "owner": "w" * 30, "priority": "batch"}
    job = {**words, "submitted_ms": 0, "prompt_tokens": 12_345, "tokens": 99, "max_tokens": 1000, "epoch": 3}
    for width in (80, 120):
        lines = drawn(job_table([job], 4_000, wide=width > 100), width)
        assert max(map(len, lines)) <= width
        assert any(line.startswith(words["id"]) for line in lines)


def test_workers_are_named_in_three_ways() -> None:
    workers = [worker(0), worker(1), worker(2, "prefill")]
    assert named(workers, ["host-1"], "") == [workers[1]]
    assert named(workers, ["4712", workers[2]["id"]], "") == [workers[2]]
    assert named(workers, [], "decode") == workers[:2]
    with pytest.raises(BadUsage, match="beginning of several workers: host-0:4710"):
        named(workers, ["host"], "")


def test_figures_are_short() -> None:
    assert [duration(ms) for ms in (0, 999, 1000, 59_940, 60_000, 3_600_000)] == [
        "0 ms", "999 ms", "1.0 s", "59.9 s", "1 min 0 s", "1 h 0 min",
    ]  # fmt: skip
    assert [count(n) for n in (0, 999, 999.7, 1234, 34_500, 2.5e6, 3e9)] == [
        "0", "999", "1.0k", "1.2k", "34k", "2.5M", "3.0G",
    ]  # fmt: skip
    assert [size(n) for n in (0, 999, 1500, 15_000_000, 2_147_483_648)] == ["0 B", "999 B", "1.5 kB", "15 MB", "2.1 GB"]


def test_a_job_names_its_request() -> None:
    assert [request_of(name) for name in ("cmpl-1/0", "cmpl-1", "a/b", "x/12")] == ["cmpl-1", "cmpl-1", "a/b", "x"]
