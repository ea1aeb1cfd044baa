"""The supervisor, with small programs for children."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from prelay import restart
from prelay.child import LINE_BYTES, Child, ChildSpec
from prelay.errors import ChildFailed, CliError
from prelay.supervisor import Supervisor
from tests.unit.cli.supervised import Lines, said

#: Ends on SIGTERM, as every process does that does not say otherwise.
SLEEPER = "import time\nprint('up', flush=True)\ntime.sleep(600)"
STUBBORN = (
    "import signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\nprint('up', flush=True)\ntime.sleep(600)"
)


def spec(name: str, code: str, **more: object) -> ChildSpec:
    return ChildSpec(name, (sys.executable, "-I", "-S", "-c", code), **more)  # type: ignore[arg-type]


async def test_a_child_that_dies_is_started_again_under_a_new_pid(supervisor: Supervisor, lines: Lines) -> None:
    keeper = supervisor.keep(spec("a", SLEEPER))
    await lines.wait_for(said("a", "up"))
    assert keeper.child is not None
    first = keeper.child.pid
    os.kill(first, signal.SIGKILL)
    await lines.wait_for(said("a", "up", times=2))
    assert keeper.child.pid != first
    assert ("a", "ended with signal SIGKILL; starts again in 0.2 s") in lines.all
    assert not supervisor.failure.done()


async def test_more_fast_failures_than_allowed_end_it_with_the_childs_last_lines(
    supervisor: Supervisor, lines: Lines, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(restart, "FIRST_DELAY_S", 0.0)
    supervisor.started_up = True
    supervisor.keep(spec("a", "import sys\nprint('trying')\nsys.exit('no luck')"))
    with pytest.raises(ChildFailed) as failed:
        await asyncio.wait_for(supervisor.failure, 20)
    assert str(failed.value).startswith("a failed 9 times in a row, last with exit code 1; its last lines:")
    assert {"    trying", "    no luck"} <= set(str(failed.value).splitlines())
    assert lines.all.count(("a", "trying")) == 9


async def test_a_childs_own_verdict_at_the_start_is_one_line(supervisor: Supervisor) -> None:
    supervisor.keep(spec("a", "import sys\nsys.exit('prelay a: no such thing')"))
    with pytest.raises(ChildFailed) as failed:
        await asyncio.wait_for(supervisor.failure, 20)
    assert str(failed.value) == "a cannot run (exit code 1): prelay a: no such thing"


async def test_a_program_that_is_not_there_ends_it(supervisor: Supervisor) -> None:
    supervisor.keep(ChildSpec("a", ("/no/such/program",)))
    with pytest.raises(ChildFailed, match="cannot run /no/such/program: No such file"):
        await asyncio.wait_for(supervisor.failure, 20)


async def test_what_the_preparation_refuses_ends_it(supervisor: Supervisor) -> None:
    async def refuse() -> None:
        raise CliError("not today")

    supervisor.keep(spec("a", SLEEPER, before_start=refuse))
    with pytest.raises(CliError, match="not today"):
        await asyncio.wait_for(supervisor.failure, 20)


async def test_the_preparation_runs_before_each_start(supervisor: Supervisor, lines: Lines) -> None:
    async def prepare() -> None:
        lines("a", "prepared")

    keeper = supervisor.keep(spec("a", SLEEPER, before_start=prepare))
    await lines.wait_for(said("a", "up"))
    assert keeper.child is not None
    os.kill(keeper.child.pid, signal.SIGKILL)
    await lines.wait_for(said("a", "up", times=2))
    words = [line for _, line in lines.all if line in ("prepared", "up")]
    assert words == ["prepared", "up"] * 2


async def test_stopped_children_end_by_sigterm_and_stay_away(supervisor: Supervisor, lines: Lines) -> None:
    keepers = [supervisor.keep(spec(name, SLEEPER)) for name in ("a", "b")]
    await lines.wait_for(lambda all_lines: len(all_lines) == 2)
    await supervisor.stop(["a"])
    first, second = (keeper.child for keeper in keepers)
    assert first is not None
    assert second is not None
    assert first.returncode == -signal.SIGTERM
    assert second.returncode is None
    await supervisor.stop(["a", "b", "never started"])
    assert second.returncode == -signal.SIGTERM


async def test_a_child_that_ignores_sigterm_is_killed_after_its_patience(supervisor: Supervisor, lines: Lines) -> None:
    keeper = supervisor.keep(spec("a", STUBBORN, stop_s=0.1))
    await lines.wait_for(said("a", "up"))
    await supervisor.stop(["a"])
    assert keeper.child is not None
    assert keeper.child.returncode == -signal.SIGKILL
    assert ("a", "did not stop within 0.1 s: killed") in lines.all


async def test_a_hurry_kills_at_once_but_lets_the_server_sync(supervisor: Supervisor, lines: Lines) -> None:
    syncs = "import signal, sys, time\ndef sync(*_):\n    time.sleep(0.3)\n    print('synced')\n    sys.exit(0)\n"
    syncs += "signal.signal(signal.SIGTERM, sync)\n"
    keeper = supervisor.keep(spec("a", STUBBORN, stop_s=600.0))
    supervisor.keep(spec("server", syncs + SLEEPER, death_signal=signal.SIGTERM))
    await lines.wait_for(lambda all_lines: len(all_lines) == 2)
    stopping = asyncio.create_task(supervisor.stop(["a", "server"]))
    await asyncio.sleep(0)
    assert not stopping.done()
    supervisor.hurry.set()
    await asyncio.wait_for(stopping, 20)
    assert keeper.child is not None
    assert keeper.child.returncode == -signal.SIGKILL
    assert ("server", "synced") in lines.all


async def test_a_child_that_waits_for_its_restart_is_not_started_when_stopped(
    supervisor: Supervisor, lines: Lines, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(restart, "FIRST_DELAY_S", 600.0)
    monkeypatch.setattr(restart, "LONGEST_DELAY_S", 600.0)
    supervisor.started_up = True
    supervisor.keep(spec("a", "print('up')"))
    await lines.wait_for(said("a", "ended with exit code 0; starts again in 600 s"))
    await asyncio.wait_for(supervisor.stop(["a"]), 20)
    assert lines.all.count(("a", "up")) == 1


async def test_ctrl_c_in_the_terminal_does_not_reach_children(supervisor: Supervisor, lines: Lines) -> None:
    keeper = supervisor.keep(spec("a", SLEEPER))
    await lines.wait_for(said("a", "up"))
    assert keeper.child is not None
    assert os.getpgid(keeper.child.pid) != os.getpgid(0)


async def test_long_lines_and_bytes_that_are_no_text_pass(supervisor: Supervisor, lines: Lines) -> None:
    code = f"import sys\nsys.stdout.buffer.write(b'x' * {LINE_BYTES * 3} + b'\\n' + b'\\xff\\n' + b'no end')\n"
    supervisor.started_up = True
    supervisor.keep(spec("a", code))
    await lines.wait_for(said("a", "no end"))
    assert ("a", "�") in lines.all
    assert sum(len(line) for _, line in lines.all if set(line) == {"x"}) == LINE_BYTES * 3


async def test_a_grandchild_that_holds_the_output_does_not_hold_up_the_end(lines: Lines) -> None:
    code = "import subprocess, sys\np = subprocess.Popen(['sleep', '600'])\nprint(p.pid, flush=True)"
    child = await Child.start(spec("a", code), lines)
    assert await asyncio.wait_for(child.wait(), 20) == 0
    os.kill(int(lines.all[0][1]), signal.SIGKILL)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_children_die_with_the_supervisor_also_when_it_is_killed(tmp_path: Path, number: signal.Signals) -> None:
    code = f"""
import asyncio, signal, sys
from prelay.child import ChildSpec
from prelay.supervisor import Supervisor
async def main():
    supervisor = Supervisor(lambda name, line: print(line, flush=True))
    command = (sys.executable, "-I", "-S", "-c", "import os, time; print(os.getpid(), flush=True); time.sleep(600)")
    supervisor.keep(ChildSpec("a", command, death_signal=signal.Signals({int(number)})))
    await asyncio.sleep(600)
asyncio.run(main())
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as owner:
        assert owner.stdout is not None
        child = psutil.Process(int(owner.stdout.readline()))
        owner.kill()
    psutil.wait_procs([child], timeout=20)
    assert not child.is_running()
