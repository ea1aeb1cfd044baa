"""`prelay bench pipeline`: a whole service comes, is measured, and is gone."""

from __future__ import annotations

import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from prelay.bench.pipeline import counted
from prelay.errors import CliError
from tests.bed.bench import finish, leftovers, report, start
from tests.bed.processes import until


@pytest.fixture
def temporary() -> Iterator[Path]:
    """A folder for temporary files with a path short enough for a socket."""
    with tempfile.TemporaryDirectory(prefix="bb-") as name:
        yield Path(name)


def family(process: psutil.Process) -> set[psutil.Process]:
    return {process, *process.children(recursive=True)}


def test_it_reports_tokens_cpu_time_and_bytes_and_leaves_nothing(temporary: Path) -> None:
    found = report("pipeline", "--streams", "2,4", "--tokens", "40", "--runs", "1", TMPDIR=str(temporary))
    assert [level["streams"] for level in found["levels"]] == [2, 4]
    for level in found["levels"]:
        assert level["tokens_per_s"] > 0
        assert level["redis_bytes_per_live_request"] > 0
        costs = level["cpu_us_per_token"]
        assert {"server", "api", "prefill", "decode", "client", "supervisor"} == costs.keys()
        assert sum(costs.values()) > 0
    assert found["server"]["mode"] == "disaggregated"
    assert found["server"]["queue_server"].split()[0] in ("redis", "valkey")
    assert leftovers(temporary) == []


@pytest.mark.slow
def test_ctrl_c_stops_the_service_in_order(temporary: Path) -> None:
    process = start("pipeline", "--streams", "2", "--tokens", "50000", "--step-ms", "1", TMPDIR=str(temporary))
    mine = psutil.Process(process.pid)
    seen: set[psutil.Process] = set()

    def has_started() -> bool:
        assert process.poll() is None, process.communicate()
        seen.update(family(mine))
        return len(seen) >= 6 and any(temporary.glob("prelay-bench-*/state/server/redis.sock"))

    until(has_started, 60)
    process.send_signal(signal.SIGINT)
    code, out, err = finish(process, 60)
    assert code == 130, err
    assert "prelay bench pipeline" in out
    assert "Traceback" not in err
    assert psutil.wait_procs(seen - {mine}, timeout=10)[1] == []
    assert leftovers(temporary) == []


def test_a_service_that_does_not_start_is_one_line(temporary: Path) -> None:
    code, _, err = finish(start("pipeline", "--model", str(temporary / "none"), TMPDIR=str(temporary)))
    assert code == 1
    assert "prelay: the service did not get ready: " in err
    assert "Traceback" not in err
    assert leftovers(temporary) == []


def test_a_stream_that_ended_otherwise_is_no_measurement() -> None:
    good = b'data: {"usage":{"prompt_tokens":2,"completion_tokens":64,"total_tokens":66}}\n\ndata: [DONE]\n\n'
    assert counted(good, 64) == 64
    for tail in (good.replace(b"64,", b"63,"), good.replace(b"[DONE]", b""), b'data: {"error": "x"}\n\n'):
        with pytest.raises(CliError, match="a stream ended with"):
            counted(tail, 64)
