"""A fleet in one thread and in ticks, around the real decisions: `policy`, `scheduler` and `Admission`.

What is played here is what they decide about: streams in the queue, prompts, copies, hand-overs and tokens. Every tick
each worker claims, does what the policy says, and steps once; what a rule forbids is an assertion at the place where it
would happen.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from random import Random

from prelay_engine import scheduler
from prelay_queue.job import Priority
from prelay_worker import policy
from prelay_worker.admission import Admission

BLOCK, CHUNK, PATIENCE, MOST = 4, 16, 40, 3  # tokens, tokens a step, ticks, preempts
KEPT, KEPT_EVERY = 4, 8  # tokens of a step, ticks: what `pace` keeps for prompts of class batch


def blocks(tokens: int) -> int:
    return -(-tokens // BLOCK)


@dataclass
class Job:
    name: str
    priority: Priority
    prompt: int
    most: int  # max_tokens
    answer: int  # how many it will be
    born: int
    ids: int = 0
    preempts: int = 0
    place: str = "queued"  # queued | prefill | staged | decode | done
    exporter: Worker | None = None
    ended: int = -1

    @property
    def tokens(self) -> int:
        return self.prompt + self.ids


@dataclass
class Attempt:
    job: Job
    urgency: int
    holds: int
    reserved: int
    todo: int  # prompt tokens to be computed
    phase: str  # prefill | copying | decode | handing | held | leaving


@dataclass
class Queue:
    """The work streams of both stages: restarted before new, class before class."""

    streams: dict[tuple[str, int, str], deque[Job]] = field(default_factory=dict)

    def of(self, stage: str, urgency: int, kind: str) -> deque[Job]:
        return self.streams.setdefault((stage, urgency, kind), deque())

    def push(self, job: Job, stage: str, kind: str) -> None:
        self.of(stage, policy.URGENCY[job.priority], kind).append(job)

    def queued(self, stage: str) -> set[int]:
        """The classes that have any."""
        return {urgency for (of, urgency, _), stream in self.streams.items() if of == stage and stream}

    def take(self, stage: str, classes: Iterable[int]) -> Job | None:
        for urgency in classes:
            for kind in "rn":
                if stream := self.of(stage, urgency, kind):
                    return stream.popleft()
        return None


class Worker:
    """One worker of the simulated fleet; role is prefill, decode or unified."""

    def __init__(self, fleet: Fleet, role: str, size: int, slots: int) -> None:
        self.fleet, self.role, self.size, self.slots = fleet, role, size, slots
        self.stage = "decode" if role == "decode" else "prefill"
        self.heads: dict[str, tuple[Job, int]] = {}
        self.attempts: dict[str, Attempt] = {}
        self.admission = Admission(BLOCK)
        self.turn = 0
        self.publish()

    def __repr__(self) -> str:
        held = [(n, a.phase, a.holds, a.job.tokens) for n, a in self.attempts.items()]
        return f"<{self.role} {self.free}/{self.size} free, heads {list(self.heads)}, {held}>"

    # What the policy is told.

    @property
    def free(self) -> int:
        return self.size - sum(a.holds for a in self.attempts.values())

    def grows(self, attempt: Attempt) -> bool:
        return self.role != "prefill" and attempt.phase in ("prefill", "decode") and not attempt.reserved

    def is_reserved(self, job: Job) -> bool:
        return self.role != "prefill" and job.preempts >= MOST

    def needs(self, job: Job) -> int:
        if self.is_reserved(job):
            return blocks(job.prompt + job.most)
        return blocks(job.tokens + (self.role == "unified"))

    def rows(self) -> list[policy.Head]:
        return [
            policy.Head(
                name,
                policy.urgency_after(job.priority, self.fleet.now - since, PATIENCE),
                job.born,
                self.needs(job),
                self.is_reserved(job),
            )
            for name, (job, since) in self.heads.items()
        ]

    def holders(self) -> list[policy.Holder]:
        return [
            policy.Holder(
                name,
                a.urgency,
                a.job.born,
                a.holds + self.grows(a),
                slot=a.phase in ("prefill", "copying", "decode"),
                reserved=a.reserved,
                leaving=a.phase == "leaving",
                fixed=a.phase in ("copying", "handing") or a.job.preempts >= MOST,
            )
            for name, a in self.attempts.items()
        ]

    def room(self) -> policy.Room:
        busy = sum(holder.slot for holder in self.holders())
        spare = self.free - sum(map(self.grows, self.attempts.values()))
        spared = int(policy.HEADROOM * self.size), int(policy.HEADROOM * self.slots)
        return policy.Room(spare, self.slots - busy, self.size, False, *spared)

    # One tick.

    def tick(self) -> None:
        claimed = self.claim()
        self.move()
        for job in claimed:
            self.admission.settle(job.name)
            self.heads[job.name] = (job, self.fleet.now)
        self.admit()
        self.step()
        self.publish()

    def claim(self) -> list[Job]:
        """As the claim thread does; the model loop hears of them a moment later."""
        claimed: list[Job] = []
        while classes := self.admission.wait_open(0):
            self.turn += 1
            queued = self.fleet.queue.queued(self.stage)
            order = policy.claim_order(self.turn, classes, self.admission.unserved, queued)
            job = self.fleet.queue.take(self.stage, order)
            if job is None:
                assert self.admission.wait_open(0) < policy.CLASSES or not self.fleet.waiting(self.stage)
                break
            job.place = self.stage
            self.admission.charge(job.name, job.tokens, alone=False)
            claimed.append(job)
        return claimed

    def move(self) -> None:
        """Copies and hand-overs end, and what was asked back is given back or was claimed meanwhile."""
        for name, attempt in list(self.attempts.items()):
            job = attempt.job
            if attempt.phase == "copying":
                attempt.phase = "decode"
                assert job.exporter is not None
                del job.exporter.attempts[name]
                job.exporter = None
            elif attempt.phase == "handing":
                attempt.phase, job.place, job.exporter = "held", "staged", self
                self.fleet.queue.push(job, "decode", "r" if job.preempts else "n")
            elif attempt.phase == "leaving" and job.place == "staged":  # else it is being read, and goes after that
                self.fleet.unpush(job)
                job.exporter = None
                self.give_up(name)

    def admit(self) -> None:
        while (done := policy.decide(self.rows(), self.holders(), self.room())) is not None:
            first = policy.in_order(self.rows())[0]
            assert not policy.begins(first, self.room()) or done == policy.Begin(first.key)
            if isinstance(done, policy.Begin):
                self.begin(done.key)
            else:
                self.make_room(done.keys)
        assert not any(policy.begins(head, self.room()) for head in policy.in_order(self.rows())[:1])
        self.check_waiting()

    def begin(self, name: str) -> None:
        line = sorted(self.rows(), key=lambda head: (head.urgency, not head.reserved, head.arrival_ms))
        row = next(row for row in line if row.key == name)
        urgency = row.urgency
        assert (row.urgency, row.reserved, row.arrival_ms) == (line[0].urgency, line[0].reserved, line[0].arrival_ms)
        job, _ = self.heads.pop(name)
        needs = self.needs(job)
        assert needs <= self.free
        kept = needs if self.is_reserved(job) else 0
        phase = "copying" if self.role == "decode" else "prefill"
        self.attempts[name] = Attempt(job, urgency, needs, kept, 0 if self.role == "decode" else job.tokens, phase)
        low = [a for a in self.attempts.values() if a.reserved and a.urgency > 0]
        assert len(low) < 2 or kept == 0 or urgency == 0 or sum(a.reserved for a in low) <= self.size / 2

    def make_room(self, names: tuple[str, ...]) -> None:
        most_urgent = min(row.urgency for row in self.rows())
        assert most_urgent < policy.URGENCY[Priority.BATCH], "an equal was evicted"
        for name in names:
            attempt = self.attempts[name]
            assert attempt.urgency == policy.URGENCY[Priority.BATCH]
            assert not attempt.reserved
            assert attempt.phase in ("prefill", "decode", "held")
            if attempt.phase == "held":
                attempt.phase = "leaving"
            else:
                self.give_up(name)

    def check_waiting(self) -> None:
        """Work conserving: with heads, something is held here, and the first in line really lacks something."""
        if not self.heads:
            return
        assert self.attempts, f"idle with heads: {self}"
        first = min(self.rows(), key=lambda head: (head.urgency, not head.reserved, head.arrival_ms))
        room = self.room()
        low = sum(a.reserved for a in self.attempts.values() if a.urgency > 0)
        over = first.reserved and first.urgency > 0 and low > 0 and low + first.needs > self.size / 2
        assert not policy.fits(first, self.holders(), room) or over, f"{first} could begin: {self}"

    def give_up(self, name: str) -> None:
        job = self.attempts.pop(name).job
        job.preempts += 1
        assert job.preempts <= MOST, f"{name} was evicted too often"
        job.place = "queued"
        self.fleet.queue.push(job, "prefill", "r")

    def step(self) -> None:
        running = {n: a for n, a in self.attempts.items() if a.phase in ("prefill", "decode")}
        kept = KEPT if self.fleet.now % KEPT_EVERY == 0 else 0
        limits = scheduler.Limits(CHUNK, kept_tokens=kept)
        plan = scheduler.schedule([self.row(n, a) for n, a in running.items()], self.free, limits)
        for name in plan.evicted:
            assert not running[name].reserved
            self.give_up(name)
        for name in plan.decode:
            attempt = running[name]
            attempt.holds = max(attempt.holds, blocks(attempt.job.tokens))
            self.token(name, attempt)
        for chunk in plan.chunks:
            attempt = running[chunk.key]
            attempt.todo -= chunk.tokens
            if not attempt.todo:
                self.token(chunk.key, attempt)
        assert self.free >= 0

    def row(self, name: str, attempt: Attempt) -> scheduler.Row:
        needs = 0 if attempt.todo else max(0, blocks(attempt.job.tokens) - attempt.holds)
        return scheduler.Row(
            name, attempt.urgency, attempt.job.born, attempt.reserved > 0, attempt.todo, needs, attempt.holds
        )

    def token(self, name: str, attempt: Attempt) -> None:
        job = attempt.job
        job.ids += 1
        if job.ids >= job.answer:
            job.place, job.ended = "done", self.fleet.now
            del self.attempts[name]
        else:
            attempt.phase = "handing" if self.role == "prefill" else "decode"

    def publish(self) -> None:
        room = self.room()
        spared = (room.spared_blocks, room.spared_slots) if self.attempts else (0, 0)
        opening = policy.opening(self.rows(), self.holders(), room)
        self.admission.publish(self.free, room.slots, opening, *spared)


class Fleet:
    """Workers on one queue."""

    def __init__(self, chance: Random) -> None:
        self.chance = chance
        self.queue = Queue()
        self.now = 0
        self.jobs: list[Job] = []
        self.workers: list[Worker] = []

    def submit(self, priority: Priority, prompt: int, most: int, answer: int) -> Job:
        job = Job(f"j{len(self.jobs)}", priority, prompt, most, min(answer, most), self.now)
        self.jobs.append(job)
        self.queue.push(job, "prefill", "n")
        return job

    def waiting(self, stage: str) -> int:
        return sum(len(stream) for (of, _, _), stream in self.queue.streams.items() if of == stage)

    def unpush(self, job: Job) -> None:
        for stream in self.queue.streams.values():
            if job in stream:
                stream.remove(job)

    def tick(self) -> None:
        """All workers turn once, in any order."""
        self.now += 1
        for worker in self.chance.sample(self.workers, len(self.workers)):
            worker.tick()
