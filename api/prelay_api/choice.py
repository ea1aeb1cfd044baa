"""One choice of one request: drives its relay and turns what may be delivered into text."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import replace

from prelay_queue import failpoints, trace
from prelay_queue.errors import QueueError, QueueFull, QueueUnavailable
from prelay_queue.events import LogView
from prelay_queue.job import FinishReason
from prelay_queue.log import read_log
from prelay_queue.logs import about
from prelay_queue.note import Note
from prelay_queue.scripts import NewJob
from prelay_queue.state import State
from prelay_text.form import Form
from prelay_text.render import Part
from prelay_text.tokenizer import Tokenizer
from prelay_text.whole import Answer

from .hub import Hub
from .metrics import Timing
from .outcome import internal_error
from .relay import Action, Deliver, End, Relay, Requeue, Reread, Resubmit, Rewind

log = logging.getLogger("prelay.choice")


class Choice:
    """A relay with its I/O on one side and its assembler on the other.

    `run` is the one driver: it feeds events and answers to the relay in order, also while the client takes nothing,
    so that a preempt is answered at once. The client's side calls `deliver` when it can write, and `finish` at the
    end. Both run in one event loop, and no await stands between a decision and its effect on the assembler.
    """

    def __init__(
        self,
        hub: Hub,
        tokenizer: Tokenizer,
        form: Form,
        job: NewJob | None,  # what to submit again should Redis lose it; None for a job that is over
        *,
        keep_delivered: bool,
        changed: Callable[[], None],
        timing: Timing | None = None,
    ) -> None:
        self.form = form
        self.job = job
        self.relay = Relay(job.spec.sampling.max_tokens if job else 0, keep_delivered)
        self._hub = hub
        self._tokenizer = tokenizer
        self._assembler = form.assembler(tokenizer)
        self._reporter = form.reporter(tokenizer)
        self._opened = form.echo is None  # what stands before the answer was shown
        self._changed = changed
        self._timing = timing or Timing()
        self._subscription = hub.subscribe(form.job, self.relay)
        self._driver: asyncio.Task[None] | None = None
        self._delay = 0.1
        self._closed = False
        self.told_end = False  # the client has the finish reason
        self._phase: str | None = None
        self._phase_told = True

    def __repr__(self) -> str:
        return f"Choice({self.id!r}, {self.relay!r}, {self._assembler!r})"

    @property
    def id(self) -> str:
        return self.form.job

    @property
    def index(self) -> int:
        return self.form.index

    def resume(self, view: LogView, count: int, *, told_end: bool) -> None:
        """Go on for a client that has what the first `count` tokens of the log gave, and perhaps the end."""
        ids = self.relay.begin_at(view, count)
        self._assembler.push(ids)
        self._delivered("")
        self._opened = self._opened or self.relay.delivered > 0
        if view.state == State.DONE:
            self._apply(self.relay.on_log(view))
        else:
            self._subscription.want_log()
        if told_end:
            self.finish()
            self.told_end = True

    def start(self) -> None:
        """The job is submitted: begin to relay."""
        self._driver = asyncio.create_task(self._run(), name=f"relay {self.id}")

    def close(self) -> None:
        """Stop relaying. What the job then does is not our business any more (the session cancels it)."""
        self._closed = True  # the cancellation may be lost, see `tasks.end`
        if self._driver is not None:
            self._driver.cancel()
        self._hub.unsubscribe(self._subscription)

    # --- the client's side

    def deliver(self) -> Part:
        """Take what may be delivered. It counts as delivered from now on, before it is written."""
        ids = self.relay.take()
        delta = self._assembler.push(ids) if ids else None
        for seq in range(self.relay.delivered, self._assembler.delivered):
            trace.mark("api.send", self.id, seq)
        part = self._delivered(delta.text if delta else "")
        return self._open(part) if self.relay.delivered else part

    def finish(self) -> Part:
        """The answer is complete: take what was held back."""
        end = self.relay.end
        assert end is not None
        return self._open(self._delivered(self._assembler.finish(end.reason).text))

    @property
    def finish_reason(self) -> FinishReason:
        """Why the answer ended, for the client; only once it has."""
        assert self.relay.end is not None
        return FinishReason.LENGTH if self.form.prompt_only else self.relay.end.reason

    def _delivered(self, text: str) -> Part:
        """A text together with the tokens that it is the first to rest on."""
        before, after = self.relay.delivered, self._assembler.delivered
        self.relay.mark_delivered(after)
        if self.form.prompt_only:
            return Part("", None if self._reporter is None else ())
        ids = tuple(self.relay.ids[before:after])
        if self._reporter is None:
            return Part(text, None, ids)
        notes = (self.relay.notes.get(seq, "") for seq in range(before, after))
        return Part(text, self._reporter.push(ids, notes), ids)

    def _open(self, part: Part) -> Part:
        """Put the echoed prompt before the first part that is shown: by then its token's note is final."""
        echo, most = self.form.echo, self.form.reported
        if self._opened or echo is None:
            return part
        self._opened = True
        reports = None if most is None else echo.reports(self._tokenizer, self.first_note, most)
        return Part(echo.text, reports) + part

    @property
    def first_note(self) -> Note:
        """What is said with the first token, of the prompt too."""
        return Note.decode(self.relay.notes.get(0, ""))

    @property
    def answer(self) -> Answer:
        """All of it; only once it has ended well."""
        relay = self.relay
        assert relay.end is not None
        notes = [relay.notes.get(seq, "") for seq in range(len(relay.ids))] if relay.notes else ()
        return Answer(relay.ids, notes, relay.end.reason)

    @property
    def cursor(self) -> str:
        """The log entry up to which the client has the answer."""
        return self.relay.end_cursor if self.told_end else self.relay.cursor

    def fail(self, error: str) -> None:
        """End here with an error body, whatever the job does."""
        self._apply(self.relay.fail(error))

    # --- the driver

    async def _run(self) -> None:
        try:
            while self.relay.end is None and not self._closed:
                events, reread = await self._subscription.wait()
                for event in events:
                    await self._perform(self.relay.on_event(event))
                if reread:
                    await self._perform([Reread()])
                self._notice()
        except Exception:
            log.exception("the relay of %s failed", self.id, extra=about(self.id))
            self.fail(internal_error())

    def _notice(self) -> None:
        """A preempt, and the end of it, are told at once."""
        phase = "preempted" if self.relay.frozen else "resumed" if self._phase == "preempted" else self._phase
        if phase != self._phase:
            self._phase, self._phase_told = phase, False
            self._changed()

    def new_phase(self) -> str | None:
        """The phase that came since the last call, if one did."""
        if self._phase_told:
            return None
        self._phase_told = True
        return self._phase

    async def _perform(self, actions: Iterable[Action]) -> None:
        """Do what the relay asked for, and what it asks for then, until it asks for nothing."""
        todo = deque(self._apply(actions))
        self._notice()
        while todo:
            self._subscription.busy = True
            todo.extend(self._apply(await self._ask(todo.popleft())))
        self._subscription.busy = False

    def _apply(self, actions: Iterable[Action]) -> list[Action]:
        """Do at once what needs no I/O; return the rest."""
        rest: list[Action] = []
        for action in actions:
            self._subscription.looked = time.monotonic()
            match action:
                case Rewind(count):
                    self._assembler.rewind(count)
                case Deliver():
                    self._timing.tokens(len(self.relay.ids))
                    self._changed()
                case End(reason):
                    if reason in (FinishReason.STOP, FinishReason.LENGTH):
                        self._timing.ended(len(self.relay.ids))
                    self._changed()
                case _:
                    rest.append(action)
        return rest

    async def _ask(self, action: Action) -> list[Action]:
        """Do one action that needs Redis; where Redis does not answer, look at the log a little later instead."""
        try:
            match action:
                case Requeue(epoch, resume):
                    found = await self._requeue(epoch, resume)
                case Resubmit():
                    found = await self._resubmit(action)
                case _:
                    found = await self._reread()
        except (QueueUnavailable, QueueFull):
            await asyncio.sleep(self._delay)
            self._delay = min(2 * self._delay, 2.0)
            return [Reread()] if self.relay.end is None else []
        except QueueError as error:
            log.error("%s: %s", self.id, error, extra=about(self.id))
            return self.relay.fail(internal_error())
        self._delay = 0.1
        return found

    async def _requeue(self, epoch: int, resume: int) -> list[Action]:
        await failpoints.ahit("relay.requeue.before")
        assert self.job is not None
        queue = self._hub.queue
        answer = await queue.run(queue.scripts.requeue(self.id, epoch, resume, self.job.attachment))
        await failpoints.ahit("relay.requeue.after")
        found = _words(answer)
        words = "%s was preempted at epoch %d: %s at epoch %d, resume %d"
        log.info(words, self.id, epoch, *found, extra=about(self.id, epoch))
        if answer.code == "ok":
            self._timing.requeued(max(0, self.relay.standing - answer.resume))
        return self.relay.on_requeued(answer)

    async def _resubmit(self, action: Resubmit) -> list[Action]:
        assert self.job is not None
        queue, epoch, ids = self._hub.queue, action.epoch, action.ids
        job = replace(self.job, epoch=epoch, ids=ids, notes=action.notes)
        (answer,) = await queue.run(queue.scripts.submit([job]))
        words = "Redis lost %s: submitted again at epoch %d with %d tokens (%s)"
        log.warning(words, self.id, epoch, len(ids), answer, extra=about(self.id, epoch))
        if answer == "new":
            self._timing.resubmitted()
        return self.relay.on_submitted(answer, epoch)

    async def _reread(self) -> list[Action]:
        async with self._hub.logs:
            view = await read_log(self._hub.queue, self.id)
        return self.relay.on_log(view)


def _words(answer: object) -> tuple[str, int, int]:
    code, epoch, resume = (getattr(answer, name) for name in ("code", "epoch", "resume"))
    return code, epoch, resume
