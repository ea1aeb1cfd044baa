"""A fleet of real workers on a tiny random model: real forwards and real segments, at the pace of the null model."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from prelay_engine import loading
from prelay_engine.blocks import BlockPool
from prelay_engine.config import EngineConfig
from prelay_engine.contiguous import ContiguousKv
from prelay_engine.engine import Engine
from prelay_engine.model import Model
from prelay_engine.sequence import Sequence
from prelay_kv.sweep import sweep
from prelay_queue.job import JobSpec
from prelay_queue.scripts import text
from prelay_worker.config import Role, WorkerConfig
from tests.bed.servers import Server
from tests.faults import tally
from tests.faults.fleet import Client, NullFleet, ended
from tests.faults.forked import Forked, WorkerProcess
from tests.faults.nursed import NursedWorker, Nursery

SHM = Path("/dev/shm")
#: Positions of a block.
BLOCK = 16


class Alone:
    """What the model answers to one job that nothing disturbs: computed here, once for each."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._known: dict[JobSpec, tuple[int, ...]] = {}

    @cached_property
    def _model(self) -> Model:
        torch.set_num_threads(1)
        return loading.load(EngineConfig(model=self._folder, dtype="float32"))

    def answer(self, spec: JobSpec) -> tuple[int, ...]:
        if spec not in self._known:
            store = ContiguousKv(self._model.geometry, BlockPool(32), BLOCK)
            engine = Engine(self._model, store, EngineConfig(model=self._folder, num_blocks=32))
            sequence = Sequence(f"{spec.id}@1", spec.prompt_ids, spec.sampling)
            engine.add(sequence)
            while engine.has_work:
                engine.step()
            self._known[spec] = tuple(sequence.ids)
        return self._known[spec]


@dataclass
class TinyFleet(NullFleet):
    """Workers of the tiny model. Answers are compared with those of a process that nothing disturbs."""

    model: Path = field(kw_only=True)
    nursery: Nursery = field(kw_only=True)
    alone: Alone = field(kw_only=True)
    exact: bool = True  # numerics are equal, so answers are

    def start(self, role: Role, faults: str = "", blocks: int = 64, **changes: Any) -> WorkerProcess:
        real = {"null": None, "model": self.model, "dtype": "float32", "block_size": BLOCK}
        return super().start(role, faults, blocks, **{**real, **changes})

    def _worker(self, config: WorkerConfig, faults: str = "") -> WorkerProcess:
        return NursedWorker(self.nursery, config, faults, self.folder)

    def beat(self, worker: WorkerProcess) -> dict[str, Any]:
        """A heartbeat of this worker that is later than this call."""
        since = self.now_ms()
        while not (found := [b for b in self.status() if b["pid"] == worker.pid and b["t"] > since]):
            assert worker.code is None, self.logs()
        return found[0]

    def state(self, client: Client) -> str:
        return text(self.redis.hget(self.keys.job(client.id), "st") or "")

    def check_answer(self, client: Client, reason: str = "length") -> None:
        spec, view = client.job.spec, self.view(client)
        entries: Any = self.redis.xrange(self.keys.log(client.id))
        assert (view.state, view.reason, view.error) == ("done", reason, ""), (client.id, view, self.logs())
        assert [b"f" in data for _, data in entries] == [False] * len(view.ids) + [True]
        assert len(view.ids) == spec.sampling.max_tokens or reason != "length"
        if self.exact:
            assert view.ids == self.alone.answer(spec)[: len(view.ids)], f"{client.id} is not what it is alone"
        assert view.ids[: len(client.delivered)] == client.delivered
        tally.add(tokens=len(view.ids))

    def check_nothing_left(self) -> None:
        super().check_nothing_left()
        assert not self.segments(self.workers), "a worker that ended well left its segment"
        sweep()  # the killed could not remove theirs, and perhaps nobody has since
        assert not self.segments(), "a segment of a dead worker was not swept"

    def segments(self, workers: Iterable[Forked] | None = None) -> list[str]:
        """The files in shared memory of these workers; of all that this fleet has, or had."""
        pids = {worker.pid for worker in workers or (*self.workers, *self.ended)}
        names = [path.name for path in SHM.glob("prelay-*.kv")]
        return [name for name in names if any(f"_{pid}_" in name for pid in pids)]


@contextlib.contextmanager
def tiny_fleet(server: Server, alone: Alone, nursery: Nursery, model: Path, **options: Any) -> Iterator[TinyFleet]:
    """A fleet that leaves no process and no key. Counted as a case when it ends well."""
    with tempfile.TemporaryDirectory(prefix="tiny-") as folder:
        found = TinyFleet(server, Path(folder), model=model, nursery=nursery, alone=alone, **options)
        with ended(found):
            yield found
        tally.add(cases=1)
