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
from prelay_queue.note import LEAST_LOGPROB, Note
from prelay_queue.scripts import NewJob
from prelay_text.assembler import Assembler
from prelay_text.detokenizer import continues_text
from prelay_text.render import Part, Renderer, Usage
from prelay_text.reports import Reporter, prompt_report
from prelay_text.request import ChatRequest, CompletionRequest
from prelay_text.resolve import JobPart
from prelay_text.tokenizer import Tokenizer

from .canceller import Canceller
from .choice import Choice, View
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

    def __init__(
        self, links: Links, renderer: Renderer, request: CompletionRequest | ChatRequest, parts: Sequence[JobPart]
    ) -> None:
        self.renderer = renderer
        self._request = request
        self.submitted = False
        self._links = links
        self._changed = asyncio.Event()
        self._closed = False
        attachment = f"{links.hub.id}#{secrets.token_hex(8)}"
        self.choices = [self._choice(part, attachment, len(parts)) for part in parts]

    def __repr__(self) -> str:
        return f"Session({self.renderer.id!r}, {self.choices!r})"

    def _choice(self, part: JobPart, attachment: str, count: int) -> Choice:
        sampling, tokenizer = part.sampling, self._links.tokenizer
        spec = JobSpec(f"{self.renderer.id}/{part.choice}", part.prompt_ids, sampling, part.priority)
        # Where special tokens are shown, the one that ends the answer is not: it is an end, like a stop token.
        shown_ends = () if sampling.skip_special_tokens or sampling.ignore_eos else tokenizer.eos_ids
        assembler = Assembler(
            tokenizer,
            sampling.stop,
            stop_token_ids=(*sampling.stop_token_ids, *shown_ends),
            min_tokens=sampling.min_tokens,
            continues=continues_text(part.prompt_ids, tokenizer),
            skip_special_tokens=sampling.skip_special_tokens,
        )
        return Choice(
            self._links.hub,
            NewJob(spec, attachment, count),
            assembler,
            self._view(part),
            keep_delivered=self._links.keep_delivered,
            changed=self._changed.set,
        )

    def _view(self, part: JobPart) -> View:
        request, tokenizer, echo = self._request, self._links.tokenizer, part.echo
        most = request.reported
        reporter = None
        if most is not None:
            reporter = Reporter(
                tokenizer,
                continues=continues_text(part.prompt_ids, tokenizer),
                skip_special_tokens=part.sampling.skip_special_tokens,
                start=len(echo.text) if echo else 0,
            )
        if echo is None:
            return View(reporter)

        def opening(note: Note) -> Part:
            return Part(echo.text, None if most is None else echo.reports(tokenizer, note, most))

        return View(reporter, opening, request.prompt_only)

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
        """The canonical ids up to the end, each once; each prompt once."""
        return self._usage(sum(len(choice.relay.ids) for choice in self.choices))

    @property
    def usage_so_far(self) -> Usage | None:
        """What is delivered of it, if the client wants to hear that in every chunk."""
        if not self.renderer.continuous_usage:
            return None
        return self._usage(sum(choice.relay.delivered for choice in self.choices))

    def _usage(self, answer_tokens: int) -> Usage:
        firsts = self.choices[:: self._request.candidates]  # of each prompt
        prompt = sum(len(choice.spec.prompt_ids) for choice in firsts)
        cached = sum(choice.first_note.cached for choice in firsts)
        return Usage(prompt, 0 if self._request.prompt_only else answer_tokens, cached)

    def best(self) -> list[Choice]:
        """The choices to show once all have ended: of each prompt the `n` with the likeliest tokens, the best first."""
        n, candidates = self._request.n, self._request.candidates
        if candidates == n:
            return self.choices
        groups = (self.choices[first : first + candidates] for first in range(0, len(self.choices), candidates))
        return [choice for group in groups for choice in sorted(group, key=_mean_logprob, reverse=True)[:n]]

    def prompt_report(self, choice: Choice) -> list[Any] | None:
        """How likely the prompt's tokens were, if the request asks for it."""
        most = self._request.prompt_logprobs
        if most is None:
            return None
        return prompt_report(self._links.tokenizer, choice.spec.prompt_ids, choice.first_note, most)

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


def _mean_logprob(choice: Choice) -> float:
    """What candidates are ranked by, as OpenAI's `best_of`: the mean log-probability of the answer's tokens."""
    notes = (Note.decode(choice.relay.notes.get(seq, "")) for seq in range(len(choice.relay.ids)))
    found = [note.logprobs.logprob for note in notes if note.logprobs is not None]
    return sum(found) / len(found) if found else LEAST_LOGPROB
