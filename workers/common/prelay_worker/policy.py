"""Who runs, who waits and who is evicted on one worker. Pure: attempts and numbers in, a decision out.

Two places evict. `prelay_engine.scheduler` does, in a step, when running rows need more blocks than are free. This
module does before the step, for a job that was claimed and waits here (a *head*). Its rules:

1. *Order.* Heads stand by urgency (their class: interactive 0, normal 1, batch 2), then those with a reservation, then
   by the time of their first submit, which no restart renews. While the first cannot begin, nobody behind it does.
2. *Patience.* A head counts one class higher each time it has waited here for `patience_s`, and keeps that for the
   whole attempt. The wait here counts and not the age: a backlog of a thousand batch jobs is old, and must not outrank
   a chat for it.
3. *Eviction.* If the first head lacks blocks or slots, attempts that count as batch are evicted for a more urgent one:
   the latest first, no more of them than it takes, and none if all together would not make it fit. Never an equal, nor
   a normal one, nor one that has been preempted `max_preemptions` times, nor one whose copy or hand-over is under way.
   A prefilled attempt that waits for a decode worker counts too: it holds blocks, if no slot.
4. *Headroom.* A batch head leaves `HEADROOM` of the blocks and of the slots free, unless nothing is held here: so a
   job that comes now and then is claimed at once, and nobody is evicted for it.
5. *Reservation.* A job preempted `max_preemptions` times is admitted, where it decodes, with the KV of its whole answer
   and is not evicted again. Only the first head is looked at, so one reservation is pending at a time. Together,
   reservations below interactive hold at most `RESERVED_SHARE` of the pool; a single one may exceed it.
6. *Claims.* While a head waits, only classes above its urgency are claimed: it lets the more urgent pass until its
   patience has made it the most urgent, and then nobody. While there is no room, classes are claimed for which rule 3
   has a victim. While there is room for some, but not the headroom of rule 4, batch jobs are not claimed but in their
   turn, and then one, to wait here as a head, if none is here.

Why every job finishes:

* *No livelock.* An eviction by either place is counted in the job, and after `max_preemptions` it is a victim no more:
  J jobs are evicted at most J x `max_preemptions` times.
* *No starvation.* In the queue, `claim_order` begins one claim in ten at batch and two at normal. At a worker a head is
  passed by more urgent ones for at most two patiences; then it counts as interactive, no claim is made until it begins,
  and of the heads that are there, finitely many come before it. It fits once what runs has ended (a job that an empty
  pool cannot hold was refused), and what runs ends, for answers are finite.
* *No deadlock.* A head holds nothing here, and blocks are taken all at once or not at all. A decode head holds blocks
  of a prefill worker, and heads there may wait for those; but a decode worker waits for its own running rows only, so
  waiting goes one way and no two reservations wait for each other.
* *Work conserving.* A head that can begin does so in the same turn. The first that cannot is short of blocks, of a slot
  or of its share, and what it lacks is held by attempts that run, are copied in or wait for a decode worker. A worker
  that has heads and holds nothing does not exist.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from prelay_queue.job import Priority

#: What a class counts as; lower is more urgent.
URGENCY = {priority: urgency for urgency, priority in enumerate(Priority)}
CLASSES = len(URGENCY)
#: From here on an attempt may be evicted for a more urgent head.
EVICTABLE = URGENCY[Priority.BATCH]
#: Of a worker's blocks and slots, rounded down: what batch jobs leave to others.
HEADROOM = 1 / 16
#: Of a worker's pool: what reservations below interactive may hold together.
RESERVED_SHARE = 0.5


@dataclass(frozen=True, slots=True)
class Head:
    """A claimed job that waits for room."""

    key: str
    urgency: int
    arrival_ms: int  # of the first submit
    needs: int  # blocks that it takes when it begins
    reserved: bool = False  # `needs` is all that it will ever take
    alone: bool = False  # begins only when nothing else runs


@dataclass(frozen=True, slots=True)
class Holder:
    """An attempt that has begun here: it runs, is copied in, or is held for a decode worker."""

    key: str
    urgency: int
    arrival_ms: int
    gives: int  # blocks that are there for an admission when it goes
    slot: bool  # takes one; what is held for a decode worker does not
    reserved: int = 0  # blocks of its reservation
    leaving: bool = False  # evicted, and its blocks not free yet
    fixed: bool = False  # never a victim, or not now


@dataclass(frozen=True, slots=True)
class Room:
    """What is free for admissions, and the pool's size, in blocks."""

    blocks: int  # may be below 0: running rows will ask for more than there is
    slots: int
    total: int
    closed: bool = False  # somebody runs alone: nobody is admitted
    spared_blocks: int = 0  # of the free ones: batch heads leave them to others
    spared_slots: int = 0


@dataclass(frozen=True, slots=True)
class Opening:
    """How many classes, the most urgent first, may be claimed: into free room, and although there is none."""

    room: int = 0
    full: int = 0
    #: No batch job runs or waits here: one may be claimed in its turn though it would wait.
    unserved: bool = False


@dataclass(frozen=True, slots=True)
class Begin:
    """There is room for this head."""

    key: str


@dataclass(frozen=True, slots=True)
class Evict:
    """With these gone there will be room for the first head."""

    keys: tuple[str, ...]


def urgency_after(priority: Priority, waited_s: float, patience_s: float) -> int:
    """What a head of this class counts as after it has waited here for so long (rule 2)."""
    return max(0, URGENCY[priority] - int(waited_s / patience_s))


def claim_order(turn: int, classes: int, unserved: bool, queued: Collection[int]) -> list[int]:
    """Of the classes with jobs in the queue, those that this claim looks at; each class begins its share of turns.

    Args:
        turn: Counts the claims of a worker.
        classes: So many may be claimed, the most urgent first.
        unserved: Where batch jobs may not be claimed, their turn looks at them still, if others would pass them: one
            that is always left too little room gets here, and its patience goes on with it.
        queued: The classes that have any.
    """
    start = {8: 1, 9: 1, 0: EVICTABLE}.get(turn % 10, 0)
    order = [urgency for urgency in range(classes) if urgency in queued]
    passed = start == EVICTABLE and unserved and order
    if start in queued and (start < classes or passed):
        return [start, *(urgency for urgency in order if urgency != start)]
    return order


def decide(heads: Iterable[Head], holders: Sequence[Holder], room: Room) -> Begin | Evict | None:
    """The next thing to do for the heads; done, ask again, until there is nothing.

    A victim's blocks may come free later (`leaving`); its head then waits for them and evicts nobody else.
    """
    first = next(iter(in_order(heads)), None)
    if first is None or room.closed or _must_wait(first, holders, room):
        return None
    if fits(first, holders, room):
        return Begin(first.key)
    victims = _victims(first, holders, first.needs - room.blocks, 1 - room.slots)
    return Evict(victims) if victims else None


def begins(first: Head, room: Room) -> bool:
    """Whether `decide` begins the first head, whatever runs. False: it has to look."""
    asks = first.alone or (first.reserved and first.urgency > 0)
    return not (asks or room.closed) and _fits(first, room, held=True)


def fits(head: Head, holders: Sequence[Holder], room: Room) -> bool:
    """Whether there are a slot and the blocks for it, and, for a batch head, the headroom beside it (rule 4)."""
    return _fits(head, room, held=bool(holders))


def _fits(head: Head, room: Room, held: bool) -> bool:
    batch = head.urgency >= EVICTABLE and held
    blocks, slots = (room.spared_blocks, room.spared_slots) if batch else (0, 0)
    return head.needs <= room.blocks - blocks and room.slots > slots


def opening(heads: Iterable[Head], holders: Iterable[Holder], room: Room) -> Opening:
    """Which classes may be claimed while these heads wait (rule 6)."""
    waiting, held = in_order(heads), list(holders)
    if room.closed or any(head.alone for head in waiting):
        return Opening()
    above = waiting[0].urgency if waiting else CLASSES
    victims = any(_may_go(holder) for holder in held)
    here = [head.urgency for head in waiting] + [holder.urgency for holder in held]
    unserved = all(urgency < EVICTABLE for urgency in here)
    return Opening(room=above, full=min(above, EVICTABLE) if victims else 0, unserved=unserved)


def in_order(heads: Iterable[Head]) -> list[Head]:
    """By rule 1; equals in the order in which they were claimed."""
    return sorted(heads, key=lambda head: (head.urgency, not head.reserved, head.arrival_ms))


def _must_wait(head: Head, holders: Sequence[Holder], room: Room) -> bool:
    """Whether no eviction would help: it must run alone, or reservations below interactive would exceed their share."""
    if head.alone and any(holder.slot for holder in holders):
        return True
    reserved = sum(holder.reserved for holder in holders if holder.urgency > 0)
    capped = head.reserved and head.urgency > 0 and reserved > 0
    return capped and reserved + head.needs > RESERVED_SHARE * room.total


def _may_go(holder: Holder) -> bool:
    return holder.urgency >= EVICTABLE and not (holder.fixed or holder.leaving)


def _victims(head: Head, holders: Sequence[Holder], blocks: int, slots: int) -> tuple[str, ...]:
    """The fewest of the latest batch attempts without which `head` fits; it lacks so many blocks and slots.

    None when it will fit without, when they would not be enough, or when it is no more urgent.
    """
    coming = [holder for holder in holders if holder.leaving]
    if head.urgency >= EVICTABLE or _enough(coming, blocks, slots):
        return ()
    chosen = coming
    candidates = sorted((h for h in holders if _may_go(h)), key=lambda h: (h.urgency, h.arrival_ms, h.key))
    while candidates and not _enough(chosen, blocks, slots):
        chosen = [*chosen, candidates.pop()]
    if not _enough(chosen, blocks, slots):
        return ()
    # A small one that went first may not be needed beside a large one: the earliest is spared first.
    for holder in reversed(chosen[len(coming) :]):
        fewer = [other for other in chosen if other is not holder]
        if _enough(fewer, blocks, slots):
            chosen = fewer
    return tuple(holder.key for holder in chosen if not holder.leaving)


def _enough(going: Iterable[Holder], blocks: int, slots: int) -> bool:
    going = list(going)
    return sum(holder.gives for holder in going) >= blocks and sum(holder.slot for holder in going) >= slots
