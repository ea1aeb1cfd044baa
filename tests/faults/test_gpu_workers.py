"""Workers of the GPU path: kernels in Triton's interpreter, device memory of the fake CUDA runtime, the rest as it is.

Every answer is compared with what the same weights say on the CPU, by other kernels and undisturbed. What a card would
do beside that is in scripts/gpu_check.py.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from prelay_engine.config import GpuConfig
from prelay_worker.config import Role
from tests.bed.cudart import FakeGpus, fake_gpus, library
from tests.bed.processes import until
from tests.bed.servers import Server
from tests.bed.tiny import make_tiny_model
from tests.faults.fleet import ended
from tests.faults.forked import WorkerProcess
from tests.faults.nursed import Nursery, nursery
from tests.faults.tiny import BLOCK, Alone, TinyFleet

pytestmark = [pytest.mark.timeout(300), pytest.mark.slow]

#: Two full blocks and half of a third.
PROMPT = 2 * BLOCK + BLOCK // 2
MAX_TOKENS = 6


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def alone(model: Path) -> Alone:
    return Alone(model)


@pytest.fixture(scope="module")
def gpus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeGpus]:
    """Nobody may use them at the end: what workers left there would fail this."""
    with fake_gpus(tmp_path_factory.mktemp("gpus")) as found, pytest.MonkeyPatch.context() as environment:
        environment.setenv("PRELAY_CUDART", str(library()))
        yield found


@pytest.fixture(scope="module")
def forks(model: Path, gpus: FakeGpus) -> Iterator[Nursery]:
    with nursery(model) as found:
        yield found


@dataclass
class GpuFleet(TinyFleet):
    """Workers with a fake GPU, on which the tiny model is computed exactly."""

    gpus: FakeGpus = field(kw_only=True)

    def start(self, role: Role, faults: str = "", blocks: int = 64, **changes: Any) -> WorkerProcess:
        return super().start(role, faults, blocks, **{"gpu": GpuConfig(device="cpu", exact=True), **changes})

    def until_ready(self) -> None:
        """Loading takes seconds: the interpreter is slow, and the self-test runs in it."""
        until(lambda: all(worker.id or worker.code is not None for worker in self.workers), 120)
        super().until_ready()


@pytest.fixture
def fleet(shared_server: Server, alone: Alone, forks: Nursery, model: Path, gpus: FakeGpus) -> Iterator[GpuFleet]:
    with tempfile.TemporaryDirectory(prefix="gpu-") as folder:
        found = GpuFleet(shared_server, Path(folder), model=model, nursery=forks, alone=alone, gpus=gpus)
        with ended(found):
            yield found
    assert gpus.left() == []


def pair(fleet: GpuFleet, fault: str = "", **prefill: Any) -> tuple[WorkerProcess, WorkerProcess]:
    workers = fleet.start(Role.PREFILL, **prefill), fleet.start(Role.DECODE, fault)
    fleet.until_ready()
    return workers


def test_what_is_prefilled_on_one_gpu_and_decoded_on_another_is_what_the_cpu_says(fleet: GpuFleet) -> None:
    prefill, decode = pair(fleet)
    assert "KV is handed over by cuda_ipc" in prefill.log
    one, other = fleet.beat(prefill), fleet.beat(decode)
    assert (one["numerics"], one["layout"], one["exact"]) == (other["numerics"], other["layout"], "true")
    clients = fleet.submit(3, prompt=PROMPT, max_tokens=MAX_TOKENS)
    fleet.finish()
    assert [fleet.view(client).epoch for client in clients] == [1, 1, 1]


def test_kv_goes_through_pinned_host_memory_where_it_is_told_to(fleet: GpuFleet) -> None:
    prefill, _ = pair(fleet, kv_transport="pinned")
    assert "KV is handed over by pinned" in prefill.log
    clients = fleet.submit(2, prompt=PROMPT, max_tokens=MAX_TOKENS)
    fleet.finish()
    assert [fleet.view(client).epoch for client in clients] == [1, 1]


def test_an_exporter_that_dies_in_the_middle_of_a_copy_leaves_it_whole_and_its_memory_is_let_go(
    fleet: GpuFleet,
) -> None:
    prefill, decode = pair(fleet, "copy.middle=pause:3")
    (first,) = fleet.submit(1, prompt=PROMPT, max_tokens=MAX_TOKENS)
    until(lambda: decode.struck("copy.middle"), 30, every_s=0.005)
    prefill.kill()
    until(lambda: "unmapping the KV of dead worker" in decode.log)
    until(lambda: fleet.state(first) in ("decode", "done"), 30)
    assert fleet.view(first).epoch == 1
    until(lambda: not fleet.gpus.used(), 30)
    fleet.finish()


def test_a_decode_worker_that_dies_in_the_middle_of_a_copy_leaves_nothing_and_its_job_goes_on_elsewhere(
    fleet: GpuFleet,
) -> None:
    _, decode = pair(fleet, "copy.middle=die")
    (first,) = fleet.submit(1, prompt=PROMPT, max_tokens=MAX_TOKENS)
    until(lambda: decode.code is not None, 30)
    fleet.workers.remove(decode)
    fleet.ended.append(decode)
    fleet.queue.run(fleet.queue.scripts.disown(decode.id))
    fleet.start(Role.DECODE)
    fleet.until_ready()
    fleet.finish()
    assert fleet.view(first).epoch == 2


def test_a_preempted_answer_goes_on_as_if_nothing_had_been(fleet: GpuFleet) -> None:
    """Unified, in graphs' static buffers; an operator sends it back while it decodes."""
    fleet.start(Role.UNIFIED)
    fleet.until_ready()
    clients = fleet.submit(2, prompt=PROMPT, max_tokens=12)
    until(lambda: len(fleet.view(clients[0]).ids) >= 4, 60, every_s=0.01)
    fleet.queue.run(fleet.queue.scripts.evict(clients[0].id))
    fleet.finish()
    assert fleet.view(clients[0]).epoch == 2
