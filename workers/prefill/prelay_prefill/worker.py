"""The prefill worker: turns a prompt into KV blocks and a first token, and hands both over.

What it holds after the hand-over is the back-pressure buffer: no room, no prefill. It renews what it holds while the
job waits, so waiting never expires a job.
"""

from __future__ import annotations

from prelay_engine.sequence import NewToken, Sequence
from prelay_queue.job import Claim
from prelay_worker.worker import Worker
from prelay_worker.writer import Handoff


class PrefillWorker(Worker):
    """Serves the prefill streams."""

    def stage(self) -> str:
        return "prefill"

    def tokens_needed(self, claim: Claim) -> int:
        return len(claim.spec.prompt_ids) + len(claim.ids)

    def reserved(self, claim: Claim) -> bool:
        """A prefill needs no reservation: all its blocks are taken at admission, or none."""
        del claim
        return False

    def admit(self, claim: Claim, sequence: Sequence) -> None:
        del claim  # the sequence says all that the engine needs
        sequence.hand_over = True
        self.engine.add(sequence)

    def on_held(self, key: str, token: NewToken) -> None:
        claim = self.attempts[key].claim
        kv = self.backend.transport.export(key, self.tokens_needed(claim))
        self.leases.hand_over(claim.id, claim.epoch)
        self._put([Handoff(claim.id, claim.epoch, token.seq, token.token, kv, token.note.encode())])
