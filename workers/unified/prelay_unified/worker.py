"""The unified worker: prefill and decode in one process over one pool.

`adopt` is a move of the job to itself, so the state machine, and with it recovery, is the same as with two workers.
"""

from __future__ import annotations

from prelay_engine.sequence import Sequence
from prelay_queue.job import Claim
from prelay_worker.worker import Worker
from prelay_worker.writer import Adopt


class UnifiedWorker(Worker):
    """Serves the prefill streams and decodes what it prefilled."""

    def stage(self) -> str:
        return "prefill"

    def tokens_needed(self, claim: Claim) -> int:
        # One more than the prompt: the first decode step must not evict what was just admitted.
        return len(claim.spec.prompt_ids) + len(claim.ids) + 1

    def admit(self, claim: Claim, sequence: Sequence) -> None:
        self._put([Adopt(claim.id, claim.epoch)])
        self.engine.add(sequence)
