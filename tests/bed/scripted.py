"""A worker that does exactly what a test says, one script at a time."""

from __future__ import annotations

import itertools
import os
import secrets
import time
from collections.abc import Sequence
from typing import Any

import orjson
from redis.exceptions import ResponseError

from prelay_queue.client import SyncQueue
from prelay_queue.job import Claim, FinishReason
from prelay_queue.keys import GROUP
from prelay_queue.scripts import Emission, text
from prelay_queue.settings import QueueSettings

LEASE_MS = 60_000


class ScriptedWorker:
    """A unified worker in the hands of a test: it claims, adopts, emits, preempts and ends what it is told to."""

    def __init__(self, settings: QueueSettings) -> None:
        self.queue = SyncQueue(settings)
        self.id = f"scripted:{os.getpid()}:{secrets.token_hex(4)}"
        self._streams = self.queue.keys.work("prefill")
        for stream in self._streams:
            try:
                self.queue.redis.xgroup_create(stream, GROUP, id="0", mkstream=True)
            except ResponseError as error:
                if not str(error).startswith("BUSYGROUP"):
                    raise

    def close(self) -> None:
        self.queue.close()

    def beat(self, role: str = "unified", **changes: Any) -> None:
        """One heartbeat, as a worker that serves would write it."""
        keys = self.queue.keys
        seconds, micros = self.queue.redis.time()
        now = int(seconds) * 1000 + int(micros) // 1000
        kv = {"total": 100, "free": 100, "copying": 0, "leased": 0, "cached": 0, "orphaned": 0}
        body = {
            "id": self.id, "role": role, "host": "here", "pid": os.getpid(), "state": "ready", "running": 0,
            "waiting": 0, "kv": kv, "block_size": 16, "context_len": 4096, "model": "null", "domain": "scripted",
            "progress_ms": 0, "t": now, **changes,
        }  # fmt: skip
        name = body["id"]
        self.queue.redis.set(keys.worker(name), orjson.dumps(body), px=15_000)
        self.queue.redis.zadd(keys.workers, {name: now})

    def listen(self) -> None:
        """Make the control stream, without which nobody sends."""
        self.queue.redis.xadd(self.queue.keys.control(self.id), {"c": b"{}"})

    def heard(self) -> list[dict[str, Any]]:
        """The commands sent to this worker."""
        entries: Any = self.queue.redis.xrange(self.queue.keys.control(self.id))
        return [orjson.loads(fields[b"c"]) for _, fields in entries][1:]

    def claim(self, timeout_s: float = 10) -> Claim:
        """Wait for a job and claim it; it is then in PREFILL and ours."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            reply: Any = self.queue.redis.xreadgroup(
                GROUP, self.id, dict.fromkeys(self._streams, ">"), count=1, block=100
            )
            for stream, entries in reply or ():
                for entry, fields in entries:
                    job = text(fields[b"id"])
                    call = self.queue.scripts.claim(text(stream), text(entry), job, self.id, LEASE_MS)
                    claim = self.queue.run(call).claim
                    if claim is not None:
                        return claim
        raise AssertionError("no job came")

    def take(self, timeout_s: float = 10) -> Claim:
        """Claim a job and go to DECODE with it."""
        claim = self.claim(timeout_s)
        assert self.queue.run(self.queue.scripts.adopt(claim.id, claim.epoch, self.id)) == "ok"
        return claim

    def emit(self, claim: Claim, seq: int, ids: Sequence[int], notes: Sequence[str] = ()) -> None:
        call = self.queue.scripts.emit(self.id, [Emission(claim.id, claim.epoch, seq, tuple(ids), tuple(notes))])
        (answer,) = self.queue.run(call)
        assert answer.code == "ok", answer

    def preempt(self, claim: Claim) -> None:
        assert self.queue.run(self.queue.scripts.preempt(claim.id, claim.epoch, self.id, "test")) == "ok"

    def finish(
        self,
        claim: Claim,
        seq: int,
        ids: Sequence[int],
        reason: str = FinishReason.STOP,
        error: str = "",
        notes: Sequence[str] = (),
    ) -> None:
        call = self.queue.scripts.finish(claim.id, claim.epoch, self.id, seq, ids, reason, error, notes)
        assert self.queue.run(call) == "ok"

    def state(self, job: str) -> dict[str, str]:
        """The job's hash; empty when there is none."""
        fields: Any = self.queue.redis.hgetall(self.queue.keys.job(job))
        return {text(name): text(value) for name, value in fields.items()}


#: Makes prompts that no other test uses.
fresh_prompt = itertools.count(1)
