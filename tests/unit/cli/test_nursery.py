"""The nursery, with a crew that needs no torch."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from prelay import __version__, nursery
from prelay.child import Child, ChildSpec
from prelay.nursery import PRELAY, Nursery, modules_for
from prelay.roles import thread_variables
from prelay.supervisor import Keeper, Supervisor
from tests.integration.serve_process import is_gone
from tests.unit.cli.supervised import Lines, said

#: The function that forked workers run here, in place of the `prelay` command.
CREW = """
import json, os, signal, sys, time
from pathlib import Path

def main(argv):
    what, *rest = argv
    if what == "exit":
        print("last words", end="")  # not flushed, and no end of line
        return int(rest[0])
    if what == "raise":
        raise RuntimeError("boom")
    if what == "quit":
        sys.exit("enough")
    if what == "tell":
        print(json.dumps(told()))
        return 0
    print("up", flush=True)
    time.sleep(600)

def told():
    return {
        "pid": os.getpid(), "parent": os.getppid(), "session": os.getsid(0), "argv": sys.argv,
        "name": Path("/proc/self/comm").read_text(),
        "environment": dict(os.environ), "open": [fd for fd in os.listdir("/proc/self/fd") if alive(int(fd))],
        "stdin": os.readlink("/proc/self/fd/0"), "masked": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, ())),
        "handlers": [repr(signal.getsignal(n)) for n in (signal.SIGTERM, signal.SIGINT, signal.SIGPIPE)],
    }

def alive(fd):
    try:
        return bool(os.fstat(fd))
    except OSError:  # the one that listed them
        return False
"""
MEDDLER = """
import signal
signal.signal(signal.SIGTERM, signal.SIG_IGN)
signal.signal(signal.SIGINT, signal.SIG_IGN)
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
"""
THREADED = "import threading, time\nthreading.Thread(target=time.sleep, args=(600,), daemon=True).start()\n"
SLOW = "import time\nprint('slow', flush=True)\ntime.sleep(600)\n"
BROKEN = "raise ImportError('no such part')\n"
FRESH = [repr(kind) for kind in (signal.SIG_DFL, signal.default_int_handler, signal.SIG_IGN)]


class Yard:
    """A supervisor with a nursery, and what it warned of."""

    def __init__(self, folder: Path, supervisor: Supervisor, lines: Lines) -> None:
        self.supervisor, self.lines = supervisor, lines
        self.warnings: list[str] = []
        modules = {"crew": CREW, "meddler": MEDDLER, "threaded": THREADED, "slow": SLOW, "broken": BROKEN}
        for name, code in modules.items():
            (folder / f"{name}.py").write_text(code)
        self.environment = dict(os.environ) | {"PYTHONPATH": str(folder)} | thread_variables(1)

    def open(self, *modules: str) -> Nursery:
        self.nursery = Nursery(self.environment, modules, self.warnings.append, entry="crew:main")
        self.keeper = self.supervisor.keep(self.nursery.spec())
        return self.nursery

    @property
    def process(self) -> psutil.Process:
        assert self.keeper.child is not None
        return psutil.Process(self.keeper.child.pid)

    def spec(self, *argv: str, name: str = "a", **environment: str) -> ChildSpec:
        return self.nursery.nursed(ChildSpec(name, (*PRELAY, *argv), self.environment | environment))

    async def start(self, *argv: str, **environment: str) -> Child:
        """Start one that nobody restarts."""
        spec = self.spec(*argv, **environment)
        assert spec.before_start is not None
        async with asyncio.timeout(30):
            await spec.before_start()
            return await Child.start(spec, self.lines)

    async def code(self, *argv: str, **environment: str) -> int:
        async with asyncio.timeout(30):
            return await (await self.start(*argv, **environment)).wait()

    async def told(self, **environment: str) -> dict[str, Any]:
        child = await self.start("tell", **environment)
        assert await child.wait() == 0, child.tail
        found: dict[str, Any] = json.loads(child.tail[-1])
        return found


@pytest.fixture
async def yard(tmp_path: Path, supervisor: Supervisor, lines: Lines) -> AsyncIterator[Yard]:
    gc.collect()  # what an earlier test left open is not this one's
    before = psutil.Process().num_fds()
    found = Yard(tmp_path, supervisor, lines)
    yield found
    supervisor.hurry.set()
    await supervisor.stop([name for name in supervisor.keepers if name != "nursery"])
    await supervisor.stop(["nursery"])
    found.nursery.close()
    assert psutil.Process().num_fds() == before


async def until(what: Callable[[], object]) -> None:
    async with asyncio.timeout(30):
        while not what():  # noqa: ASYNC110 - the kernel's list of processes has no event
            await asyncio.sleep(0.01)


def pid_of(keeper: Keeper) -> int:
    assert keeper.child is not None
    return keeper.child.pid


async def test_exit_codes_and_the_last_words_come_through(yard: Yard) -> None:
    yard.open()
    assert await yard.code("exit", "0") == 0
    assert await yard.code("exit", "3") == 3
    assert yard.lines.all == [("a", "last words")] * 2
    assert await yard.code("quit") == 1
    assert yard.lines.all[-1] == ("a", "enough")
    assert await yard.code("raise") == 1
    assert yard.lines.all[-1] == ("a", "RuntimeError: boom")
    assert ("a", "Traceback (most recent call last):") in yard.lines.all
    assert yard.warnings == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
async def test_a_signal_reaches_the_worker_and_its_end_says_which(yard: Yard, number: signal.Signals) -> None:
    yard.open()
    child = await yard.start("wait")
    await yard.lines.wait_for(said("a", "up"))
    before = child.returncode
    assert before is None
    child.send(number)
    assert await asyncio.wait_for(child.wait(), 20) == -number
    assert child.returncode == -number
    child.send(number)  # nothing happens


async def test_a_worker_is_what_a_process_of_its_own_would_be(yard: Yard) -> None:
    yard.open("meddler")
    told = await yard.told(PRELAY_TEST_WORD="this", PATH="/bin")
    assert told["environment"] == yard.environment | {"PRELAY_TEST_WORD": "this", "PATH": "/bin"}
    assert told["session"] == told["pid"]
    assert told["parent"] == yard.process.pid
    assert told["name"] == "prelay-tell\n"
    assert told["argv"] == ["prelay", "tell"]
    assert told["stdin"] == "/dev/null"
    assert told["masked"] == []
    assert told["handlers"] == FRESH


async def test_no_descriptor_leaks_and_no_zombie_stays(yard: Yard) -> None:
    yard.open()
    waiting = [await yard.start("wait") for _ in range(3)]
    ours, theirs = psutil.Process().num_fds(), yard.process.num_fds()
    for _ in range(3):
        assert sorted((await yard.told())["open"]) == ["0", "1", "2"]
    assert psutil.Process().num_fds() == ours
    assert yard.process.num_fds() == theirs
    assert {process.pid for process in yard.process.children()} == {child.pid for child in waiting}
    await asyncio.gather(*(child.stop() for child in waiting))
    assert yard.process.children() == []
    assert yard.process.num_fds() == theirs - len(waiting)


async def test_a_killed_worker_is_started_again_from_the_nursery(yard: Yard) -> None:
    yard.open()
    keeper = yard.supervisor.keep(yard.spec("wait"))
    await yard.lines.wait_for(said("a", "up"))
    first = pid_of(keeper)
    os.kill(first, signal.SIGKILL)
    await yard.lines.wait_for(said("a", "up", times=2))
    assert ("a", "ended with signal SIGKILL; starts again in 0.2 s") in yard.lines.all
    assert [process.pid for process in yard.process.children()] == [pid_of(keeper)] != [first]


async def test_a_killed_nursery_takes_its_workers_along_and_all_come_back(yard: Yard) -> None:
    yard.open()
    keepers = [yard.supervisor.keep(yard.spec("wait", name=name)) for name in ("a", "b")]
    await yard.lines.wait_for(lambda lines: lines.count(("a", "up")) == lines.count(("b", "up")) == 1)
    old = [yard.process, *yard.process.children()]
    assert len(old) == 3
    old[0].kill()
    await yard.lines.wait_for(lambda lines: lines.count(("a", "up")) == lines.count(("b", "up")) == 2)
    assert all(is_gone(process) for process in old)
    assert {process.pid for process in yard.process.children()} == {pid_of(keeper) for keeper in keepers}
    assert yard.warnings == []
    assert not yard.supervisor.failure.done()


async def test_a_nursery_with_a_thread_refuses_and_workers_start_plainly_with_one_warning(yard: Yard) -> None:
    yard.open("threaded")
    for _ in range(2):
        assert await yard.code("--version") == 0
    assert yard.lines.all == [("a", f"prelay {__version__}")] * 2
    assert yard.warnings == [
        "a starts as a plain process, which takes longer; the nursery: 2 threads run in it, and a fork would take one"
        " of them"
    ]


async def test_a_nursery_that_cannot_import_is_given_up_and_nothing_else(yard: Yard) -> None:
    yard.open("broken")
    assert await yard.code("--version") == 0
    await yard.lines.wait_for(said("nursery", "ImportError: no such part"))
    await until(yard.keeper.task.done)  # type: ignore[union-attr]
    assert await yard.code("--version") == 0
    assert not yard.supervisor.failure.done()
    assert yard.warnings[0].endswith("the nursery: it ended before it was ready")
    assert len(yard.warnings) <= 2


async def test_a_worker_with_another_number_of_threads_is_no_fork(yard: Yard) -> None:
    yard.open()
    assert await yard.code("--version", OMP_NUM_THREADS="7") == 0
    assert yard.warnings == [
        "a starts as a plain process, which takes longer; the nursery: it has another number of threads"
    ]


async def test_a_worker_that_waits_for_the_nursery_can_be_stopped(yard: Yard) -> None:
    yard.open("slow")
    keeper = yard.supervisor.keep(yard.spec("wait"))
    await yard.lines.wait_for(said("nursery", "slow"))
    await asyncio.wait_for(yard.supervisor.stop(["a"]), 10)
    assert keeper.child is None


async def test_a_nursery_that_does_not_answer_is_not_waited_for_and_its_late_worker_is_killed(
    yard: Yard, monkeypatch: pytest.MonkeyPatch
) -> None:
    yard.open()
    assert await yard.code("exit", "0") == 0
    monkeypatch.setattr(nursery, "ANSWER_S", 0.1)
    yard.process.suspend()
    assert await yard.code("--version") == 0
    assert yard.warnings == ["a starts as a plain process, which takes longer; the nursery: it does not answer"]
    monkeypatch.undo()
    yard.process.resume()
    assert await yard.code("exit", "5") == 5
    await until(lambda: not yard.process.children())


def test_workers_die_with_a_supervisor_that_is_killed(tmp_path: Path) -> None:
    (tmp_path / "crew.py").write_text(CREW)
    code = """
import asyncio, os, sys
from prelay.child import ChildSpec
from prelay.nursery import PRELAY, Nursery
from prelay.supervisor import Supervisor
async def main():
    supervisor = Supervisor(lambda name, line: print(nursing.child.pid, keeper.child.pid, flush=True))
    nursery = Nursery(dict(os.environ), [], print, entry="crew:main")
    nursing = supervisor.keep(nursery.spec())
    keeper = supervisor.keep(nursery.nursed(ChildSpec("a", (*PRELAY, "wait"))))
    await asyncio.sleep(600)
asyncio.run(main())
"""
    environment = dict(os.environ) | {"PYTHONPATH": str(tmp_path)}
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, env=environment) as owner:
        assert owner.stdout is not None
        processes = [psutil.Process(int(pid)) for pid in owner.stdout.readline().split()]
        assert [process.name() for process in processes] == ["prelay-nursery", "prelay-wait"]
        owner.kill()
    psutil.wait_procs(processes, timeout=20)
    assert all(is_gone(process) for process in processes)


def test_the_code_of_the_models_architecture_is_imported_where_transformers_has_it(tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text('{"model_type": "llama"}')
    assert "transformers.models.llama.modeling_llama" in modules_for(tmp_path)
    common = [name for name in modules_for(tmp_path) if "llama" not in name]
    for text in ('{"model_type": "no-such-model"}', "{}", "[]", "not json"):
        config.write_text(text)
        assert modules_for(tmp_path) == common
    config.unlink()
    assert modules_for(tmp_path) == common
