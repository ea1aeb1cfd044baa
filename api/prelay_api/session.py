"""One request from its submit to its last byte: its choices, and what becomes of their jobs when the client goes."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from prelay_queue import trace
from prelay_queue.errors import QueueUnavailable
from prelay_queue.job import JobSpec
from prelay_queue.scripts import NewJob
from prelay_text.assembler import Assembler
from prelay_text.detokenizer import continues_text
from prelay_text.render import Renderer, Usage
from prelay_text.reports import Reporter, prompt_report
from prelay_text.resolve import JobPart
from prelay_text.tokenizer import Tokenizer

from .canceller import Canceller
from .choice import Choice
from .hub import Hub
from .outcome import Failure, failure


@dataclass(frozen=True, slots=True)
class Links:
    """What a session needs of the process it runs in."""

    hub: Hub
    canceller: Canceller
    tokenizer: Tokenizer
    keep_delivered: bool
    closed: Callable[[Session], None]


class Session:
    """The choices of one request, relayed side by side. Always `close` it."""

    def __init__(self, links: Links, renderer: Renderer, parts: Sequence[JobPart]) -> None:
        self.renderer = renderer
        self.submitted = False
        self._links = links
        self._changed = asyncio.Event()
        self._closed = False
        attachment = f"{links.hub.id}#{secrets.token_hex(8)}"
        self.choices = [self._choice(part, attachment, len(parts)) for part in parts]

    def __repr__(self) -> str:
        return f"Session({self.renderer.id!r}, {self.choices!r})"

    def _choice(self, part: JobPart, attachment: str, count: int) -> Choice:
        sampling = part.sampling
        spec = JobSpec(f"{self.renderer.id}/{part.choice}", part.prompt_ids, sampling, part.priority)
        continues = continues_text(part.prompt_ids, self._links.tokenizer)
        assembler = Assembler(
            self._links.tokenizer,
            sampling.stop,
            stop_token_ids=sampling.stop_token_ids,
            min_tokens=sampling.min_tokens,
            continues=continues,
        )
        reporter = Reporter(self._links.tokenizer, continues=continues) if sampling.logprobs >= 0 else None
        return Choice(
            self._links.hub,
            NewJob(spec, attachment, count),
            assembler,
            reporter,
            keep_delivered=self._links.keep_delivered,
            changed=self._changed.set,
        )

    async def submit(self) -> None:
        """Put all jobs into the queue, or none. Raise QueueFull, QueueUnavailable or QueueError."""
        queue = self._links.hub.queue
        for choice in self.choices:
            trace.mark("api.submit", choice.id)
        try:
            await queue.run(queue.scripts.submit([choice.job for choice in self.choices]))
        except (QueueUnavailable, asyncio.CancelledError):
            self.submitted = True  # perhaps: the answer may have been lost, so the close cancels
            raise
        self.submitted = True
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
                return found
        return None

    @property
    def ended(self) -> bool:
        return all(choice.relay.end is not None for choice in self.choices)

    @property
    def usage(self) -> Usage:
        """The canonical ids up to the end, each once; the prompt once."""
        prompt = len(self.choices[0].spec.prompt_ids)
        cached = self.choices[0].first_note.cached
        return Usage(prompt, sum(len(choice.relay.ids) for choice in self.choices), cached)

    def prompt_report(self, choice: Choice) -> list[Any] | None:
        """How likely the prompt's tokens were, if the request asks for it."""
        if choice.spec.sampling.prompt_logprobs < 0:
            return None
        return prompt_report(self._links.tokenizer, choice.spec.prompt_ids, choice.first_note)

    def cursor(self) -> str:
        """Where the client stands, for each choice."""
        return ",".join(choice.cursor for choice in self.choices)

    def close(self) -> None:
        """Stop relaying and cancel what still runs. Does not wait, so a cancelled request cannot skip it."""
        if self._closed:
            return
        self._closed = True
        self._links.closed(self)
        for choice in self.choices:
            choice.close()
            if self.submitted and not choice.relay.over:
                self._links.canceller.put(choice.id, choice.job.attachment)
