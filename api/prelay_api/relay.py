"""What one viewer knows of one choice, and what is to be done next. Pure: no I/O, no clock.

The rules (docs: preemption recovery):

1. Only tokens of the current epoch, without a gap, are taken in; anything else that claims to be newer makes the
   relay read the log again, which is the truth.
2. A preempt freezes delivery. The job is re-queued from what was delivered, and only after the answer is dropped
   what lies beyond the resume that the winner reports.
3. What was delivered is never taken back. A token that arrives for a place already delivered is compared with
   what the client saw; a difference ends the answer with an error instead of a contradiction.

The one driver of a relay feeds it in order: events, and the answers to the actions it asked for, before any later
event. So an answer is always at least as new as what the relay knew when it asked.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile

import orjson

from prelay_queue.events import EndedEvent, LiveEvent, LogView, PreemptedEvent, RequeuedEvent, TokensEvent
from prelay_queue.job import FinishReason
from prelay_queue.scripts import Requeued
from prelay_queue.state import State


@dataclass(frozen=True, slots=True)
class Deliver:
    """Tokens wait to be taken."""


@dataclass(frozen=True, slots=True)
class Rewind:
    """Whoever took tokens forgets those from `count` on; none of them was delivered."""

    count: int


@dataclass(frozen=True, slots=True)
class Requeue:
    """Run the requeue script; feed the answer to `on_requeued`. `resume` -1 keeps all that was emitted."""

    epoch: int
    resume: int


@dataclass(frozen=True, slots=True)
class Reread:
    """Read the log and feed it to `on_log`."""


@dataclass(frozen=True, slots=True)
class Resubmit:
    """Redis lost the job: submit it again; feed the answer to `on_submitted`."""

    epoch: int
    ids: tuple[int, ...]
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class End:
    """The answer is over. `error` is a JSON body where `reason` says error."""

    reason: FinishReason
    error: str = ""


Action = Deliver | Rewind | Requeue | Reread | Resubmit | End


def _common(left: Sequence[int], right: Sequence[int]) -> int:
    """Length of the common prefix."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(left, right, strict=False)))


class Relay:
    """The state of one choice as its viewer sees it.

    epoch      the attempt whose tokens count
    ids        the answer as known here; never shorter than `delivered`
    notes      what is said of some of them (note.py), by seq
    standing   how many of them stand in the log; fewer than `delivered` only after Redis lost data
    taken      how many were handed to the assembler
    delivered  how many of those the client may have seen (set by `mark_delivered`)
    frozen     a preempt waits for its requeue: nothing is handed out
    end        the one End, once it has come
    """

    def __init__(self, max_tokens: int, keep_delivered: bool = True) -> None:
        self.epoch = 1
        self.ids: list[int] = []
        self.notes: dict[int, str] = {}
        self.standing = 0
        self.taken = 0
        self.delivered = 0
        self.frozen = False
        self.end: End | None = None
        self.over = False  # the log has the end: there is nothing left to cancel
        self._written_in: list[int] = []  # the epoch of each id, for the cursor
        self._max_tokens = max_tokens
        self._keep_delivered = keep_delivered

    def __repr__(self) -> str:
        state = self.end or ("frozen" if self.frozen else "open")
        return (
            f"Relay(epoch={self.epoch}, delivered={self.delivered}, taken={self.taken}, standing={self.standing},"
            f" ids={len(self.ids)}, {state})"
        )

    # --- what the client gets

    @property
    def pending(self) -> int:
        """How many tokens may be taken now."""
        return 0 if self.frozen else len(self.ids) - self.taken

    def take(self) -> tuple[int, ...]:
        """Hand out what may be handed out. Call `mark_delivered` before anything of it is written."""
        if self.frozen:
            return ()
        fresh = tuple(self.ids[self.taken :])
        self.taken = len(self.ids)
        return fresh

    def mark_delivered(self, count: int) -> None:
        """The client may see the first `count` tokens from now on."""
        assert self.delivered <= count <= self.taken, f"{count} of {self!r}"
        assert count == self.delivered or not self.frozen, f"{count} of {self!r}: the requeue names what was delivered"
        self.delivered = count

    @property
    def cursor(self) -> str:
        """The log entry of the last token delivered; 0-0 before any."""
        seq = self.delivered - 1
        return f"{self._written_in[seq]}-{seq}" if seq >= 0 else "0-0"

    @property
    def end_cursor(self) -> str:
        """The log entry of the end."""
        return f"{self.epoch}-{len(self.ids)}"

    def begin_at(self, view: LogView, count: int) -> tuple[int, ...]:
        """Go on where a client is that has the first `count` tokens of the log; return those.

        Then mark them delivered, and feed it the view, or a later one.
        """
        assert not self.ids, f"{self!r} has begun"
        self.epoch = view.epoch
        self.ids, self._written_in = list(view.ids[:count]), list(view.epochs[:count])
        self._note(0, view.notes[:count])
        self.standing = self.taken = len(self.ids)
        return tuple(self.ids)

    # --- what happens

    def on_event(self, event: LiveEvent) -> list[Action]:
        """Take in one live event, which may be late, doubled or out of order."""
        if self.end is not None or event.epoch < self.epoch:
            return []
        if isinstance(event, RequeuedEvent):
            return [] if event.epoch == self.epoch else self._adopt(event.epoch, event.resume)
        if event.epoch > self.epoch:
            return [Reread()]
        match event:
            case TokensEvent(seq=seq, ids=ids, notes=notes):
                return self._absorb(seq, ids, notes)
            case PreemptedEvent():
                return [] if self.frozen else self._freeze()
            case EndedEvent(count=count, reason=reason, error=error):
                return self._conclude(reason, error) if count == self.standing else [Reread()]

    def on_log(self, view: LogView | None) -> list[Action]:
        """Take in the log, read after everything that was fed in before."""
        if self.end is not None:
            return []
        if view is None:
            return self._resubmit()
        same = _common(self.ids, view.ids)
        if same < min(self.delivered, len(view.ids)):
            return self._diverge(same)
        before = self.taken
        self._replace(view, same)
        actions: list[Action] = [Rewind(self.taken)] if self.taken < before else []
        self.epoch = view.epoch
        if view.state == State.DONE:
            return actions + self._conclude(view.reason, view.error)
        if view.state == State.PREEMPTED:
            return actions + self._freeze()
        self.frozen = False
        return actions + self._offer()

    def on_requeued(self, answer: Requeued) -> list[Action]:
        """Take in the answer to Requeue: mine, or the winner's."""
        if self.end is not None:
            return []
        if answer.code in ("ok", "lost") and answer.epoch > self.epoch:
            return self._adopt(answer.epoch, answer.resume)
        return [Reread()]  # done, gone, or not what we thought it was

    def on_submitted(self, answer: str, epoch: int) -> list[Action]:
        """Take in the answer to Resubmit: the log now begins with our ids, all written at `epoch`."""
        if self.end is not None:
            return []
        if answer != "new":
            return [Reread()]
        self.epoch, self.standing, self.frozen = epoch, len(self.ids), False
        self._written_in = [epoch] * len(self.ids)
        return self._offer()

    def fail(self, error: str) -> list[Action]:
        """End here, whatever the job does."""
        return [] if self.end is not None else self._finish(End(FinishReason.ERROR, error))

    # --- decisions

    def _absorb(self, seq: int, ids: tuple[int, ...], notes: tuple[str, ...]) -> list[Action]:
        if seq > self.standing:
            return [Reread()]
        known = self.ids[seq : seq + len(ids)]
        same = _common(known, ids)
        if same < len(known):
            if seq + same < self.delivered:
                return self._diverge(seq + same)
            return [Reread()]  # one epoch writes a seq once: only a Redis that lost data says two things
        fresh = ids[same:]
        self._note(len(self.ids), notes[same:])
        self.ids.extend(fresh)
        self._written_in.extend([self.epoch] * len(fresh))
        self.standing = max(self.standing, seq + len(ids))
        return self._offer()

    def _freeze(self) -> list[Action]:
        self.frozen = True
        return [Requeue(self.epoch, self.delivered if self._keep_delivered else -1)]

    def _adopt(self, epoch: int, resume: int) -> list[Action]:
        """Go on with attempt `epoch`, of whose answer the first `resume` tokens stand."""
        if epoch > self.epoch + 1 or resume > self.standing:
            return [Reread()]  # an attempt passed unseen, or tokens did
        before = self.taken
        self.epoch, self.standing, self.frozen = epoch, resume, False
        self._cut(max(resume, self.delivered))
        return [Rewind(self.taken), *self._offer()] if self.taken < before else self._offer()

    def _cut(self, count: int) -> None:
        del self.ids[count:]
        del self._written_in[count:]
        for seq in [seq for seq in self.notes if seq >= count]:
            del self.notes[seq]
        self.taken = min(self.taken, count)

    def _replace(self, view: LogView, same: int) -> None:
        """Make the log's ids ours, but for what was delivered and is not there yet; the first `same` agree."""
        self.standing = len(view.ids)
        self._cut(max(same, self.delivered))
        fresh = view.ids[len(self.ids) :]
        self._note(len(self.ids), view.notes[len(self.ids) :])
        self._written_in.extend(view.epochs[len(self.ids) :])
        self.ids.extend(fresh)

    def _note(self, seq: int, notes: tuple[str, ...]) -> None:
        """Keep what is said of the tokens from `seq` on."""
        self.notes.update((at, note) for at, note in enumerate(notes, seq) if note)

    def _resubmit(self) -> list[Action]:
        if len(self.ids) >= self._max_tokens:
            return self._conclude(FinishReason.LENGTH, "")  # complete; only its end was lost
        notes = tuple(self.notes.get(seq, "") for seq in range(len(self.ids))) if self.notes else ()
        return [Resubmit(self.epoch + 1, tuple(self.ids), notes)]

    def _conclude(self, reason: str, error: str) -> list[Action]:
        """The log has ended at `standing` tokens."""
        self.over = True
        end = End(FinishReason(reason), error)
        if self.standing < self.delivered and end.reason in (FinishReason.STOP, FinishReason.LENGTH):
            return self._diverge(self.standing)
        return self._finish(end)

    def _diverge(self, seq: int) -> list[Action]:
        self.taken = max(self.taken, self.delivered)
        self._cut(self.taken)  # nothing more is handed out
        body = {
            "message": f"the server lost data and token {seq} of the answer no longer matches what was sent",
            "type": "server_error",
            "code": "diverged",
            "param": None,
            "status": 500,
        }
        return self._finish(End(FinishReason.ERROR, orjson.dumps(body).decode()))

    def _finish(self, end: End) -> list[Action]:
        self.frozen = False
        self.end = end
        return [end]

    def _offer(self) -> list[Action]:
        return [Deliver()] if self.pending else []
