"""A whole answer from what stands in the logs of its choices: the body that a request gets which does not stream."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from prelay_queue.job import FinishReason
from prelay_queue.note import LEAST_LOGPROB, Note

from .form import Form
from .render import Choice, Part, Renderer, Usage
from .reports import prompt_report
from .request import ChatRequest, CompletionRequest
from .tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Answer:
    """The tokens of one choice that ended well. `notes` has one for each id (note.py), or none at all."""

    ids: Sequence[int]
    notes: Sequence[str]
    reason: FinishReason

    @property
    def first_note(self) -> Note:
        """What is said with the first token, of the prompt too."""
        return Note.decode(self.notes[0]) if self.notes else Note()

    @property
    def mean_logprob(self) -> float:
        """What candidates are ranked by, as OpenAI's `best_of`: the mean log-probability of the tokens."""
        found = [note.logprobs.logprob for note in map(Note.decode, self.notes) if note.logprobs is not None]
        return sum(found) / len(found) if found else LEAST_LOGPROB


def renderer_of(
    request: CompletionRequest | ChatRequest,
    *,
    id: str,  # noqa: A002 - the field's name
    created: int,
    model: str,
    system_fingerprint: str,
) -> Renderer:
    """What renders the answer to a request. `created` is in Unix seconds."""
    return Renderer(
        chat=isinstance(request, ChatRequest),
        id=id,
        created=created,
        model=model,
        system_fingerprint=system_fingerprint,
        include_usage=request.stream_options.include_usage,
        continuous_usage=request.stream_options.continuous_usage,
        token_ids=request.return_token_ids,
        service_tier=_tier(request.service_tier) if isinstance(request, ChatRequest) else None,
    )


def _tier(asked: str | None) -> str | None:
    """The tier that an answer names: `auto` is the default one."""
    return "default" if asked == "auto" else asked


def whole_body(tokenizer: Tokenizer, forms: Sequence[Form], answers: Sequence[Answer]) -> tuple[bytes, Usage]:
    """The body of a request whose choices have all ended well, in the order of their index; and the usage in it.

    Raise BadMessageError when a note is none, or is missing where logprobs are asked for.
    """
    shown = [_choice(tokenizer, index, forms[at], answers[at]) for index, at in enumerate(best(forms, answers))]
    tokens = sum(len(answer.ids) for answer in answers)
    usage = usage_of(forms, (answer.first_note for answer in answers), tokens)
    return forms[0].renderer.answer(shown, usage), usage


def best(forms: Sequence[Form], answers: Sequence[Answer]) -> list[int]:
    """Which choices are shown: of each prompt the `n` with the likeliest tokens, the best first."""
    n, candidates = forms[0].n, forms[0].candidates
    if candidates == n:
        return list(range(len(answers)))
    groups = (range(first, first + candidates) for first in range(0, len(answers), candidates))
    return [at for group in groups for at in sorted(group, key=lambda at: answers[at].mean_logprob, reverse=True)[:n]]


def usage_of(forms: Sequence[Form], first_notes: Iterable[Note], answer_tokens: int) -> Usage:
    """The tokens of a request: each prompt once, and `answer_tokens` of all its choices.

    `first_notes` has that of each choice's first token.
    """
    candidates, prompt_only = forms[0].candidates, forms[0].prompt_only
    prompt = sum(form.prompt_tokens for form in forms[::candidates])
    cached = sum(note.cached for note in list(first_notes)[::candidates])
    return Usage(prompt, 0 if prompt_only else answer_tokens, cached)


def _choice(tokenizer: Tokenizer, index: int, form: Form, answer: Answer) -> Choice:
    reported = None
    if form.prompt_logprobs is not None:
        reported = prompt_report(tokenizer, form.prompt_ids, answer.first_note, form.prompt_logprobs)
    reason = FinishReason.LENGTH if form.prompt_only else answer.reason
    return Choice(index, _part(tokenizer, form, answer), reason, form.prompt_ids, reported)


def _part(tokenizer: Tokenizer, form: Form, answer: Answer) -> Part:
    part = _answered(tokenizer, form, answer)
    echo, most = form.echo, form.reported
    if echo is None:
        return part
    return Part(echo.text, None if most is None else echo.reports(tokenizer, answer.first_note, most)) + part


def _answered(tokenizer: Tokenizer, form: Form, answer: Answer) -> Part:
    """The answer without what stands before it."""
    reporter = form.reporter(tokenizer)
    if form.prompt_only:
        return Part("", None if reporter is None else ())
    assembler = form.assembler(tokenizer)
    delta = assembler.push(answer.ids)
    text = (delta.text if delta else "") + assembler.finish(answer.reason).text
    notes = answer.notes or ("",) * len(answer.ids)
    return Part(text, None if reporter is None else reporter.push(answer.ids, notes), tuple(answer.ids))
