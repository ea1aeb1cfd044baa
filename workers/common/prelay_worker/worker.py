"""The life of a worker process: five threads around one model loop.

    claim ──┐                        ┌── writer ── scripts
    control ┼── inbox ── model loop ─┤
    lease ──┘        (owns the       └── copy threads (decode)
                      engine)

All engine state belongs to the model loop; the other threads talk to it through the inbox, and it answers through
the writer. One turn of the loop is `_turn`.
"""

from __future__ import annotations

import logging
import os
import queue
import signal
import socket
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import replace

import orjson

from prelay_engine.flag import Flag
from prelay_engine.sequence import NewToken, Sequence, Step
from prelay_engine.shrink import NO_MEMORY
from prelay_queue import trace
from prelay_queue.client import SyncQueue
from prelay_queue.job import Claim, FinishReason, Priority

from . import policy
from .admission import Admission
from .attempt import Attempt
from .backend import Backend
from .claimer import Claimer
from .config import WorkerConfig
from .control import Control
from .heads import Heads
from .lease import LeaseKeeper
from .messages import Claimed, Copied, Drain, Evict, Exported, Message, Release, Stop, key_of
from .metrics import WorkerMetrics
from .writer import Begin, Expire, Fail, Forget, GiveUp, Matcher, Recall, Tokens, Write, Writer

log = logging.getLogger("prelay.worker")

#: Why a sequence ended with an error, by what stands in place of its token.
_FAULTS = {NO_MEMORY: "the worker has not enough memory for this request, even alone"}

#: Builds a stop-string matcher that has seen `ids`; None when the job has no stop strings.
MatcherFactory = Callable[[Claim], Matcher | None]


class Worker(ABC):
    """What prefill, decode and unified workers share. Subclasses say how a claim becomes work."""

    def __init__(self, config: WorkerConfig, backend: Backend, matcher: MatcherFactory, name: str) -> None:
        self.config = config
        self.backend = backend
        self.engine = backend.engine
        self.id = name
        #: What every heartbeat says of this worker, and never changes.
        self._about = {
            "id": name,
            "role": config.role,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "block_size": backend.block_size,
            "context_len": backend.context_len,
            "threads": config.threads,
            "model": backend.model,
            "domain": backend.transport.domain,
            **backend.detail,
        }
        self.metrics = WorkerMetrics()
        recorder = self.metrics.recorder
        self.queue = SyncQueue(config.queue, recorder)
        self._make_matcher = matcher
        self._inbox: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self.attempts: dict[str, Attempt] = {}
        self._heads = Heads(config.patience_s, self._needs, self.reserved)
        self._wanted_back: dict[str, bool] = {}  # evictions asked for before their claim arrived
        self._draining = False
        self._urgent_waits = False  # at the head, and the model loop cannot begin it yet
        self._called = Flag()  # something was posted for which batch work is to be left
        self._admission = Admission(backend.block_size)
        self.leases = LeaseKeeper(self.queue, self.id, backend.transport, self._post, recorder)
        self.writer = Writer(self.queue, self.id, backend.transport.domain, self._hear_writer, recorder)
        self._control = Control(self.queue, self.id, self._post)
        self._claimer = Claimer(
            self.queue,
            self.id,
            self.stage(),
            self._admission,
            self.leases,
            self._post,
            self.short_tokens(),
            recorder,
        )

    # What a role decides.

    @abstractmethod
    def stage(self) -> str:
        """Return the stage whose work streams this worker serves: "prefill" or "decode:<domain>"."""

    def short_tokens(self) -> int:
        """Return up to how many tokens of a prefill are taken beside the stage's own work."""
        return 0

    def most_claims(self) -> int:
        """Return into how many free slots jobs may be claimed now; 0 is none, whatever room is or could be made."""
        return self.config.max_running

    @abstractmethod
    def admit(self, claim: Claim, sequence: Sequence) -> None:
        """Begin the attempt: there is room for it."""

    @abstractmethod
    def tokens_needed(self, claim: Claim) -> int:
        """Return how many tokens of KV the attempt needs at admission."""

    def on_held(self, key: str, token: NewToken) -> None:  # noqa: ARG002
        """A hand-over sequence has its prefill complete and its first token sampled."""
        raise AssertionError(f"{key} is held, and this role hands nothing over")

    def on_copied(self, message: Copied) -> None:
        """A copy thread has ended."""
        raise AssertionError(f"{message.key} was copied, and this role copies nothing")

    def close_role(self) -> None:  # noqa: B027 - most roles start nothing
        """Stop what the role started itself."""

    # The life of the process.

    def run(self) -> int:
        """Serve until a drain is asked for (SIGTERM, SIGINT, control). Return the exit code."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: self._inbox.put(Drain()))
        self._publish()
        self._control.start()
        self.leases.start()
        self.writer.start()
        self._claimer.start()
        log.info("worker %s is ready", self.id)
        while not self._draining:
            self._turn()
        self._shut_down()
        return 0

    def _shut_down(self) -> None:
        """Give back and stop, in an order in which nothing is lost.

        1 stop claiming, so that nothing new arrives; 2 take what arrived meanwhile; 3 give every attempt back, which
        restarts it elsewhere; 4 write that out; 5 stop renewing, only after the writes; 6 unmap what is mapped; 7 say
        farewell.
        """
        self._control.ask_stop()  # its read ends while the claimer's does
        self._claimer.stop()
        self._drain_inbox()
        for attempt in list(self.attempts.values()):
            self._evict(attempt, "drain")
        for claim in self._take_heads(lambda _: True):
            self._put([GiveUp(claim.id, claim.epoch, "drain")])
        self.writer.stop(timeout_s=5)
        self.leases.stop()
        self._control.stop()
        self.close_role()
        for end in (self.backend.transport.close, self.leases.farewell):
            try:
                end()
            except Exception as error:  # the process ends anyway; heartbeat and memory are then found by others
                log.warning("%s: %s", end.__qualname__, error)
        self.queue.close()

    # One turn of the model loop.

    def _turn(self) -> None:
        """1 hear the other threads, 2 end what is too late, 3 admit who waits, 4 one engine step, 5 write its tokens,
        6 say how it stands."""
        self._hear()
        self._end_overdue()
        self._admit_heads()
        if self.engine.has_work:
            self._after(self.engine.step(self._called))
        self._publish()

    def _post(self, message: Message) -> None:
        """What any other thread tells the model loop, which leaves a batch's step if an urgent job can go on by it."""
        self._inbox.put(message)
        if isinstance(message, Claimed):
            self._call_for(message.claim)
        elif self._urgent_waits:  # what it waits for may be this
            self._called.set()

    def _call_for(self, claim: Claim) -> None:
        if policy.URGENCY[claim.spec.priority] < policy.EVICTABLE:
            self._called.set()

    def _hear(self) -> None:
        if not self.engine.has_work:
            try:
                self._on(self._inbox.get(timeout=0.5))
            except queue.Empty:
                return
        self._drain_inbox()

    def _drain_inbox(self) -> None:
        self._called.clear()  # before the messages are read: one that comes meanwhile is heard, or calls again
        while True:
            try:
                self._on(self._inbox.get_nowait())
            except queue.Empty:
                return

    def _on(self, message: Message) -> None:
        match message:
            case Claimed(claim):
                self._on_claimed(claim)
            case Stop(job, epoch, why):
                self._on_stop(key_of(job, epoch), why)
            case Release(job, epoch):
                self._on_release(key_of(job, epoch))
            case Evict(job, epoch):
                self._on_evict(job, epoch)
            case Exported(key):
                self._on_exported(key)
            case Copied():
                self.on_copied(message)
            case Drain():
                self._draining = True

    def _on_claimed(self, claim: Claim) -> None:
        key = key_of(claim.id, claim.epoch)
        self._admission.settle(key)
        self._put([Begin(claim.id, claim.epoch)])
        if (same := self.attempts.get(key)) is not None:  # of a job that Redis lost since: neither can go on under it
            self._free(same)
            self._put([GiveUp(claim.id, claim.epoch, "lost")])
            return
        if self._wanted_back.pop(key, False):
            self.leases.drop(claim.id, claim.epoch)
            self._put([GiveUp(claim.id, claim.epoch, "admin")])
            return
        total = len(claim.spec.prompt_ids) + claim.spec.sampling.max_tokens
        if not self.engine.fits(total):
            stats = self.engine.stats()
            self._fail(
                claim,
                f"prompt ({len(claim.spec.prompt_ids)} tokens) + max_tokens ({claim.spec.sampling.max_tokens}) "
                f"need {total} tokens of KV, and this worker's pool holds {stats.total * self.backend.block_size}",
                "context_length_exceeded",
                400,
            )
            return
        self._heads.add(claim)

    def _admit_heads(self) -> None:
        """Carry out what the policy decides, until there is nothing more to do."""
        self._begin_what_fits()
        while self._heads:
            holders = [self._holder(attempt) for attempt in self.attempts.values()]
            match policy.decide(self._heads.rows(), holders, self._room()):
                case policy.Begin(key):
                    self._begin(*self._heads.pop(key))
                case policy.Evict(keys):
                    for key in keys:
                        self._make_room(self.attempts[key])
                case None:
                    break
        self._urgent_waits = any(head.urgency < policy.EVICTABLE for head in self._heads.rows())

    def _begin_what_fits(self) -> None:
        """The heads in order, as long as nothing that runs need be looked at: hundreds may come at once to hundreds."""
        if not self._heads:
            return
        room = self._room()
        for head in policy.in_order(self._heads.rows()):
            if not policy.begins(head, room):
                return
            self._begin(*self._heads.pop(head.key))
            room = replace(room, blocks=self.engine.spare, slots=self._slots())

    def _begin(self, claim: Claim, urgency: int) -> None:
        attempt = Attempt(claim, len(claim.ids), urgency, self._needs(claim) if self.reserved(claim) else 0)
        self.attempts[attempt.key] = attempt
        trace.mark(f"{self.config.role}.start", claim.id, len(claim.ids))
        matcher = self._make_matcher(claim)
        if matcher is not None:
            self.writer.watch(attempt.key, matcher)
        sequence = attempt.sequence()
        self.metrics.began(attempt, sequence, self.leases.server_ms)
        self.admit(claim, sequence)

    def _make_room(self, attempt: Attempt) -> None:
        """Evict an attempt for a more urgent head. What may be read by a decode worker is asked back first."""
        log.info("%s makes room for a more urgent job", attempt.key, extra=attempt.about)
        if attempt.exported:
            attempt.leaving = True
            self._put([Recall(attempt.claim.id, attempt.claim.epoch, "urgent")])
        else:
            self._evict(attempt, "urgent")

    def _end_overdue(self) -> None:
        """End here what is past its deadline, whether Redis answers or not. An export, which somebody may be reading,
        stays: `expire` ends its job, and then we are told to release it."""
        now_ms = self.leases.server_ms
        for claim in self._take_heads(lambda claim: claim.overdue(now_ms)):
            self._put([Expire(claim.id, claim.epoch)])
        for attempt in [each for each in self.attempts.values() if each.slot and each.claim.overdue(now_ms)]:
            log.info("%s is past its deadline", attempt.key, extra=attempt.about)
            self._free(attempt)
            self._put([Expire(attempt.claim.id, attempt.claim.epoch)])

    # What the policy is told.

    def _needs(self, claim: Claim) -> int:
        """Blocks that the attempt takes when it begins."""
        total = len(claim.spec.prompt_ids) + claim.spec.sampling.max_tokens
        tokens = total if self.reserved(claim) else self.tokens_needed(claim)
        return -(-tokens // self.backend.block_size)

    def _holder(self, attempt: Attempt) -> policy.Holder:
        return attempt.holder(self.engine.gives(attempt.key), self.config.max_preemptions)

    def _room(self) -> policy.Room:
        blocks, closed = self.backend.kv_blocks, self._draining or self._runs_alone()
        spared = (int(policy.HEADROOM * each) for each in (blocks, self.config.max_running))
        return policy.Room(self.engine.spare, self._slots(), blocks, closed, *spared)

    def _slots(self) -> int:
        # A held sequence, waiting to be copied away, takes blocks but no slot.
        return max(0, self.config.max_running - self.engine.running - self.engine.waiting)

    def _opening(self, room: policy.Room) -> policy.Opening:
        evictable = (a for a in self.attempts.values() if a.urgency >= policy.EVICTABLE)
        return policy.opening(self._heads.rows(), map(self._holder, evictable), room)

    def reserved(self, claim: Claim) -> bool:
        """After `max_preemptions` a job gets its full remaining KV at admission, and is not evicted again."""
        return claim.preemptions >= self.config.max_preemptions

    def _after(self, step: Step) -> None:
        held, now = set(step.held), time.monotonic()
        writes: list[Write] = []
        for new in step.tokens:
            attempt = self.attempts.get(new.key)
            if attempt is None:
                continue  # stopped while the step ran
            attempt.emitted = new.seq + 1
            self.metrics.sampled(attempt, new, now)
            trace.mark("prefill.sampled" if new.key in held else "step.end", attempt.claim.id, new.seq)
            if new.key in held and new.finish is None:
                attempt.slot, attempt.moving = False, True
                self.on_held(new.key, new)
                continue
            if new.finish is FinishReason.ERROR:
                self._forget(attempt)
                why = _FAULTS.get(new.token, "the model computed no finite logits")
                self._fail(attempt.claim, why, "model_error", 500, new.seq)
                continue
            note = new.note.encode()
            writes.append(
                Tokens(
                    attempt.claim.id,
                    attempt.claim.epoch,
                    new.seq,
                    (new.token,),
                    new.finish,
                    (note,) if note else (),
                    patient=attempt.claim.spec.priority is Priority.BATCH,
                )
            )
            if new.finish is not None:
                self._forget(attempt)
        for key in step.evicted:
            attempt = self.attempts.get(key)
            if attempt is not None:
                writes.append(GiveUp(attempt.claim.id, attempt.claim.epoch, "kv"))
                self._forget(attempt)
        self.metrics.stepped(self.engine)
        self._put(writes)

    def _publish(self) -> None:
        self.leases.stamp()
        stats = self.engine.stats()
        room = self._room()
        most = self.most_claims()
        opening = self._opening(room) if most else policy.Opening()
        spared = (room.spared_blocks, room.spared_slots) if self.attempts else (0, 0)
        self._admission.publish(stats.available, min(most, room.slots), opening, *spared)
        self.leases.publish(
            {
                **self._about,
                "state": "draining" if self._draining else "ready",
                "running": self.engine.running,
                "waiting": self.engine.waiting + len(self._heads),
                "kv": stats,
                "computed_tokens": self.engine.computed_tokens,
                "prefix_queries": self.engine.prefix_queries,
                "prefix_hits": self.engine.prefix_hits,
            }
        )

    def _runs_alone(self) -> bool:
        return any(attempt.alone for attempt in self.attempts.values())

    # Ends of an attempt.

    def _on_stop(self, key: str, why: str) -> None:
        attempt = self.attempts.get(key)
        if attempt is None:
            self._take_heads(lambda claim: key_of(claim.id, claim.epoch) == key)
            return
        log.info("%s stops here: %s", key, why, extra=attempt.about)
        self._free(attempt)

    def _on_release(self, key: str) -> None:
        attempt = self.attempts.get(key)
        if attempt is None:
            return
        attempt.released = True
        if attempt.exported:
            self._free(attempt)

    def _hear_writer(self, message: Message) -> None:
        """Called in the writer thread. The lease changes its kind at once, not when the model loop finds time."""
        if isinstance(message, Exported):
            job, _, epoch = message.key.rpartition("@")
            self.leases.export(job, int(epoch))
        self._post(message)

    def _on_exported(self, key: str) -> None:
        attempt = self.attempts.get(key)
        if attempt is None:  # stopped while the answer travelled: nothing is held here any more
            job, _, epoch = key.rpartition("@")
            self.leases.drop(job, int(epoch))
            return
        attempt.exported, attempt.moving = True, False
        if attempt.released:
            self._free(attempt)

    def _on_evict(self, job: str, epoch: int) -> None:
        for attempt in list(self.attempts.values()):
            if attempt.claim.id == job and epoch in (0, attempt.claim.epoch):
                self._evict(attempt, "admin")
                return
        for claim in self._take_heads(lambda claim: claim.id == job and epoch in (0, claim.epoch)):
            self._put([GiveUp(claim.id, claim.epoch, "admin")])
            return
        # Not here yet: the wish may overtake the claim that it is about.
        self._wanted_back[key_of(job, epoch)] = True
        while len(self._wanted_back) > 1024:
            del self._wanted_back[next(iter(self._wanted_back))]

    def _take_heads(self, wanted: Callable[[Claim], bool]) -> list[Claim]:
        """Remove claims that wait for room, and their leases."""
        taken = self._heads.take(wanted)
        for claim in taken:
            self.leases.drop(claim.id, claim.epoch)
        return taken

    def _evict(self, attempt: Attempt, reason: str) -> None:
        """Free first, then say so: the blocks are free when the job can be claimed again."""
        self._free(attempt)
        self._put([GiveUp(attempt.claim.id, attempt.claim.epoch, reason)])

    def _free(self, attempt: Attempt) -> None:
        """Give back what the attempt holds in the engine, and forget it."""
        self._put([Forget(attempt.claim.id, attempt.claim.epoch)])
        if attempt.exported:
            self.engine.release(attempt.key)
        else:
            self.engine.drop(attempt.key)
        self._forget(attempt)

    def _forget(self, attempt: Attempt) -> None:
        self.attempts.pop(attempt.key, None)
        self.leases.drop(attempt.claim.id, attempt.claim.epoch)

    def _fail(self, claim: Claim, message: str, code: str, status: int, seq: int | None = None) -> None:
        """End the job with an error; `seq` is how many tokens stand, if more than at the claim."""
        kind = "invalid_request_error" if status < 500 else "server_error"
        body = {"message": message, "type": kind, "code": code, "param": None, "status": status}
        self.leases.drop(claim.id, claim.epoch)
        standing = len(claim.ids) if seq is None else seq
        self._put([Fail(claim.id, claim.epoch, standing, orjson.dumps(body).decode())])

    def _put(self, writes: Iterable[Write]) -> None:
        self.writer.put(writes, self.leases.stamp)
