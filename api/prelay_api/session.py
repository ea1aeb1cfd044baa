"""One request from its submit to its last byte: its choices, and what becomes of their jobs when the client goes."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from prelay_queue import trace
from prelay_queue.client import AsyncQueue
from prelay_queue.errors import QueueUnavailable
from prelay_queue.job import JobSpec
from prelay_queue.metric_table import NO_CLASS
from prelay_queue.recorder import NOBODY, Recorder
from prelay_queue.scripts import NewJob
from prelay_text.form import Form, form_of
from prelay_text.render import Renderer, Usage
from prelay_text.request import ChatRequest, CompletionRequest
from prelay_text.resolve import JobPart
from prelay_text.tokenizer import Tokenizer
from prelay_text.whole import usage_of, whole_body

from .canceller import Canceller
from .choice import Choice
from .hub import Hub
from .idempotency import Sent
from .metrics import Timing
from .outcome import DEADLINE, Failure, failure, late


@dataclass(frozen=True, slots=True)
class Links:
    """What a session needs of the process it runs in."""

    hub: Hub
    canceller: Canceller
    tokenizer: Tokenizer
    keep_delivered: bool
    closed: Callable[[Session], None]
    recorder: Recorder = NOBODY

    def attachment(self) -> str:
        """A new name under which to watch jobs."""
        return f"{self.hub.id}#{secrets.token_hex(8)}"


def new_jobs(
    links: Links,
    renderer: Renderer,
    request: CompletionRequest | ChatRequest,
    parts: Sequence[JobPart],
    sent: Sent | None,
) -> list[tuple[Form, NewJob]]:
    """The jobs of a request, and how each is shown."""
    key, digest = (sent.key, sent.digest) if sent else ("", "")
    attachment, found = links.attachment(), []
    for part in parts:
        form = form_of(request, part, renderer, links.tokenizer)
        spec = JobSpec(form.job, part.prompt_ids, part.sampling, part.priority)
        found.append((form, NewJob(spec, attachment, len(parts), form=form.encode(), key=key, digest=digest)))
    return found


class Session:
    """The choices of one request, relayed side by side. Always `close` it.

    `work` has for each choice its form, and its job unless that is over. `attached`: the jobs are there already, and
    we watch them as `attachment`. `arrived_at`: the request, on the monotonic clock; None: it arrived elsewhere.
    """

    def __init__(
        self,
        links: Links,
        work: Sequence[tuple[Form, NewJob | None]],
        attachment: str,
        *,
        attached: bool = False,
        arrived_at: float | None = None,
    ) -> None:
        self.renderer = work[0][0].renderer
        self.attached = attached
        self.arrived_at = arrived_at
        self.cls = next((str(job.spec.priority) for _, job in work if job is not None), NO_CLASS)
        self.begun = False  # the client has the first chunks of a stream
        self.handed_on = False
        self.linger_s = 0.0  # how long the jobs are watched on when the client vanishes
        self._links = links
        self._form = work[0][0]
        self._attachment = attachment
        self._changed = asyncio.Event()
        self._closed = False
        self.choices = [
            Choice(
                links.hub,
                links.tokenizer,
                form,
                job,
                keep_delivered=links.keep_delivered,
                changed=self._changed.set,
                timing=Timing(links.recorder, self.cls, arrived_at),
            )
            for form, job in work
        ]

    @classmethod
    def begin(
        cls,
        links: Links,
        renderer: Renderer,
        request: CompletionRequest | ChatRequest,
        parts: Sequence[JobPart],
        sent: Sent | None = None,
        arrived_at: float | None = None,
    ) -> Session:
        """A session for a new request, whose jobs are still to be submitted; `sent` under a key, or not."""
        work = new_jobs(links, renderer, request, parts, sent)
        return cls(links, work, work[0][1].attachment, arrived_at=arrived_at)

    def __repr__(self) -> str:
        return f"Session({self.renderer.id!r}, {self.choices!r})"

    async def submit(self) -> None:
        """Put all jobs into the queue, or none. Raise SentBefore, QueueBusy, QueueFull, QueueError."""
        queue = self._links.hub.queue
        for choice in self.choices:
            trace.mark("api.submit", choice.id)
        try:
            await queue.run(queue.scripts.submit([choice.job for choice in self.choices if choice.job is not None]))
        except (QueueUnavailable, asyncio.CancelledError):
            self.attached = True  # perhaps: the answer may have been lost, so the close cancels
            raise
        self.attached = True
        self.start()

    def start(self) -> None:
        """The jobs are there: begin to relay."""
        for choice in self.choices:
            choice.start()

    async def wait(self, timeout_s: float) -> bool:
        """Wait until a choice may have something new; False when nothing came in time."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._changed.wait()
        except TimeoutError:
            return False
        self._changed.clear()
        return True

    def abort(self, why: Failure) -> None:
        """End every choice that has not ended."""
        for choice in self.choices:
            choice.fail(why.encode())

    def failed(self) -> Failure | None:
        """What went wrong with the first choice that did not end well."""
        for choice in self.choices:
            if choice.relay.end is not None and (found := failure(choice.relay.end)):
                return self.late if found == DEADLINE else found
        return None

    @property
    def late(self) -> Failure:
        """What is told when the deadline has passed."""
        return late(self._form.deadline_ms)

    def hand_on(self) -> None:
        """This process shuts down: let the client go on elsewhere with the stream, or with its request."""
        self.handed_on = True
        self._changed.set()

    def news(self) -> list[str]:
        """Phases that choices have come into since the last call, to be told while nothing flows."""
        return [phase for choice in self.choices if (phase := choice.new_phase()) is not None]

    @property
    def queue(self) -> AsyncQueue:
        return self._links.hub.queue

    @property
    def ends_at(self) -> float:
        """The deadline, by this process's monotonic clock; 0 when there is none."""
        return max((choice.job.ends_at for choice in self.choices if choice.job is not None), default=0.0)

    @property
    def ended(self) -> bool:
        return all(choice.relay.end is not None for choice in self.choices)

    @property
    def usage(self) -> Usage:
        """The canonical ids up to the end, each once; each prompt once."""
        return self._usage(sum(len(choice.relay.ids) for choice in self.choices))

    @property
    def usage_so_far(self) -> Usage | None:
        """What is delivered of it, if the client wants to hear that in every chunk."""
        if not self.renderer.continuous_usage:
            return None
        return self._usage(sum(choice.relay.delivered for choice in self.choices))

    def _usage(self, answer_tokens: int) -> Usage:
        forms, firsts = [choice.form for choice in self.choices], (choice.first_note for choice in self.choices)
        return usage_of(forms, firsts, answer_tokens)

    def whole(self) -> bytes:
        """The body of an answer that is not streamed; only once all choices have ended well."""
        answers = [choice.answer for choice in self.choices]
        body, _ = whole_body(self._links.tokenizer, [choice.form for choice in self.choices], answers)
        return body

    def cursor(self) -> str:
        """Where the client stands, for each choice."""
        return ",".join(choice.cursor for choice in self.choices)

    def close(self) -> None:
        """Stop relaying, and watch no more after `linger_s`: what still runs then, watched by nobody, is cancelled.

        Does not wait, so a cancelled request cannot skip it.
        """
        if self._closed:
            return
        self._closed = True
        self._links.closed(self)
        for choice in self.choices:
            choice.close()
            if self.attached and not choice.relay.over:
                self._links.canceller.put(choice.id, self._attachment, self.linger_s)
