"""What tests of every kind share."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from xdist.scheduler import LoadScopeScheduling

from prelay_engine.demo import default_cache, fetch_demo
from prelay_engine.errors import DemoError

#: Threads of torch that wait sleep instead of spin: here, and in the processes that tests start. Several test processes
#: share the cores, and one that spins takes away what it waits for. It is read when torch is imported, which is later.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

#: Kernels for GPUs run in Triton's interpreter, on this CPU. It is read when a kernel is defined.
os.environ.setdefault("TRITON_INTERPRET", "1")

# A run that a shell put into the background ignores Ctrl-C, and so would all processes that it starts and interrupts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# How long one example takes says how busy the machine is.
settings.register_profile("prelay", settings.default, deadline=None)
settings.load_profile("prelay")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """What is imported here stays. The collector never looks at it: some tests collect, to see that nothing is left."""
    gc.disable()
    yield
    gc.collect()
    gc.freeze()
    gc.enable()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol() -> Generator[None, object, object]:
    """Who handles Ctrl-C in one test does not in the next: a worker of RQ, say, leaves its handlers behind."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        return (yield)
    finally:
        for number, handler in before.items():
            if signal.getsignal(number) is not handler:
                signal.signal(number, handler)


def pytest_unconfigure() -> None:
    """Triton counts what nobody collects at the end, and says so."""
    gc.unfreeze()


@pytest.fixture(scope="session")
def demo_model() -> Path:
    """Folder of the demo model: $PRELAY_TEST_MODEL, or the cache, filled if need be. Without it skip; in CI fail."""
    if given := os.environ.get("PRELAY_TEST_MODEL"):
        return Path(given)
    try:
        return fetch_demo(default_cache(), lambda _what, _share: None)
    except DemoError as error:
        if os.environ.get("CI"):
            pytest.fail(str(error))
        pytest.skip(str(error))


#: Where tests compute with the real model for minutes.
MODEL_TESTS = ("tests/e2e/", "tests/integration/test_engine_model.py", "tests/integration/test_serve_nursery.py")


class ByServers(LoadScopeScheduling):  # type: ignore[misc]
    """How tests are shared out to processes. A file's stay together, for they share servers.

    All that compute with the real model stay together as well: two of them on two cores only wait for each other.
    """

    def _split_scope(self, nodeid: str) -> str:
        return "model" if nodeid.startswith(MODEL_TESTS) else nodeid.partition("::")[0]


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> ByServers:
    return ByServers(config, log)
