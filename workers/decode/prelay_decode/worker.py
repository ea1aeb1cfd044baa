"""The decode worker: copies the KV of a staged job and turns it into tokens.

It never runs a prompt through the model, unless it is told to take short ones (`local_prefill_tokens`): those it begins
itself when no prefill worker has, like a unified worker. The copy has threads of its own and does not stall the running
batch; a job joins at the step after its copy is complete, checked and adopted.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from prelay_engine.sequence import Sequence
from prelay_queue import trace
from prelay_queue.job import Claim
from prelay_worker.backend import Backend
from prelay_worker.config import WorkerConfig
from prelay_worker.errors import DeviceBroken, HandoverBlocked, HandoverBroken, HandoverFailed
from prelay_worker.messages import Copied, key_of
from prelay_worker.worker import MatcherFactory, Worker
from prelay_worker.writer import Adopt, GiveUp

from .reach import Reach

#: Copies at a time: one keeps a core busy; a second hides the latency of the first pages.
COPY_THREADS = 2

#: Hand-overs of one job that may fail in a row; one more ends it with an error.
HANDOVER_TRIES = 7


class DecodeWorker(Worker):
    """Serves the decode streams of its KV domain."""

    def __init__(self, config: WorkerConfig, backend: Backend, matcher: MatcherFactory, name: str) -> None:
        super().__init__(config, backend, matcher, name)
        self._copiers = ThreadPoolExecutor(COPY_THREADS, thread_name_prefix="copy")
        self._reach = Reach()

    def stage(self) -> str:
        return f"decode:{self.backend.transport.domain}"

    def short_tokens(self) -> int:
        return self.config.local_prefill_tokens

    def tokens_needed(self, claim: Claim) -> int:
        # A local prefill has one more: its first decode step must not evict what was just admitted.
        return len(claim.spec.prompt_ids) + len(claim.ids) + (not claim.kv)

    def most_claims(self) -> int:
        if not self._reach.stands_back:
            return super().most_claims()
        trying = len(self._heads) or any(attempt.moving for attempt in self.attempts.values())
        return 0 if trying or self._reach.pauses else 1

    def admit(self, claim: Claim, sequence: Sequence) -> None:
        if not claim.kv:
            self._put([Adopt(claim.id, claim.epoch)])
            self.engine.add(sequence)
            return
        self.attempts[sequence.key].moving = True
        self.engine.receive(sequence)
        self._copiers.submit(self._copy, claim)

    def _copy(self, claim: Claim) -> None:
        key = key_of(claim.id, claim.epoch)
        # The last id has no KV yet: it is what the first decode step feeds.
        tokens = self.tokens_needed(claim) - 1
        try:
            self.backend.transport.fetch(claim.kv, key, tokens)
            self._inbox.put(Copied(key))
            self._call_for(claim)
        except HandoverFailed as error:
            self._inbox.put(Copied(key, error))
        except Exception as error:  # a copy thread must always answer, or the blocks stay COPYING for ever
            self._inbox.put(Copied(key, HandoverBlocked(f"{type(error).__name__}: {error}")))

    def on_copied(self, message: Copied) -> None:
        if isinstance(message.error, DeviceBroken):
            raise message.error  # no job is to blame, and a new process can go on with all of them
        if message.error is None:
            self._reach.worked()
        elif isinstance(message.error, HandoverBlocked):
            self._reach.failed(message.error)
        attempt = self.attempts.get(message.key)
        if attempt is None:
            self.engine.copied(message.key)
            return
        claim = attempt.claim
        if message.error is None:
            trace.mark("decode.copied", claim.id, len(claim.ids))
            attempt.moving = False
            self.metrics.copied(attempt)
            self.engine.join(message.key)
            self._put([Adopt(claim.id, claim.epoch)])
            return
        self._free(attempt)
        self.engine.copied(message.key)
        # A fault that comes back at every attempt must end the job, not circle for ever.
        hopeless = claim.failed_handovers >= HANDOVER_TRIES
        if hopeless or isinstance(message.error, HandoverBroken):
            self._fail(claim, f"the KV hand-over failed: {message.error}", "kv_handover_failed", 500)
        else:
            self._put([GiveUp(claim.id, claim.epoch, f"hand-over: {message.error}")])

    def close_role(self) -> None:
        # Running copies end by themselves in milliseconds, unless they pin a peer's memory first; those that have not
        # begun are of jobs that were given back. After this nothing reads a peer's memory.
        self._copiers.shutdown(wait=True, cancel_futures=True)
