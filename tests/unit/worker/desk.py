"""A worker's model loop without its threads: the test plays them, and reads what the loop wrote."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from prelay_decode.worker import DecodeWorker
from prelay_prefill.worker import PrefillWorker
from prelay_queue.job import Claim, JobSpec, Priority, Sampling
from prelay_queue.settings import QueueSettings
from prelay_unified.worker import UnifiedWorker
from prelay_worker.config import NullModel, Role, WorkerConfig
from prelay_worker.messages import Claimed, Message
from prelay_worker.null import null_backend
from prelay_worker.worker import Worker
from prelay_worker.writer import Begin, Forget, Write

CLASSES: dict[Role, Any] = {Role.PREFILL: PrefillWorker, Role.DECODE: DecodeWorker, Role.UNIFIED: UnifiedWorker}
BLOCK = 4


class Written:
    """In the place of the writer: keeps what it is given. What only begins or is forgotten never reaches the queue."""

    def __init__(self) -> None:
        self.writes: list[Write] = []
        self.forgotten: list[str] = []

    def put(self, operations: Iterable[Write], stamp: Callable[[], None]) -> None:
        for operation in operations:
            if isinstance(operation, Forget):
                self.forgotten.append(operation.key)
            elif not isinstance(operation, Begin):
                self.writes.append(operation)

    def watch(self, key: str, matcher: object) -> None:
        raise AssertionError("no stop strings here")


def make_worker(role: Role, blocks: int = 16, **changes: Any) -> tuple[Worker, list[Write]]:
    """A worker that is connected to nothing, and the list that its writes go to."""
    queue = QueueSettings("unix:///nowhere", "t")
    config = WorkerConfig(role, queue, None, blocks, BLOCK, null=NullModel(step_ms=0), **changes)
    worker: Worker = CLASSES[role](config, null_backend(config), lambda _: None, "me")
    written = Written()
    worker.writer = written  # type: ignore[assignment]
    return worker, written.writes


def make_claim(
    job: str = "r/0",
    prompt: int = 4,
    max_tokens: int = 8,
    epoch: int = 1,
    priority: Priority = Priority.NORMAL,
    **changes: Any,
) -> Claim:
    """`ids` without more are those of a job that was handed over: its KV lies somewhere."""
    spec = JobSpec(job, tuple(range(prompt)), Sampling(max_tokens, ignore_eos=True), priority)
    if changes.get("ids"):
        changes.setdefault("kv", b"kv")
    return Claim(spec, epoch, **changes)


def give(worker: Worker, *messages: Message | Claim) -> None:
    """The other threads say this, and the loop turns once, as if it had not to wait."""
    for message in messages:
        worker._inbox.put(Claimed(message) if isinstance(message, Claim) else message)
    worker._drain_inbox()
    worker._admit_heads()


def step(worker: Worker) -> None:
    worker._after(worker.engine.step())


def free(worker: Worker) -> int:
    stats = worker.engine.stats()
    assert stats.orphaned == 0
    return stats.free


def held(worker: Worker) -> dict[tuple[str, int], str]:
    """What the lease thread would renew."""
    return dict(worker.leases._held)
