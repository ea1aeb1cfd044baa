"""What happened to a job, for people: its way through the states, and the attempts that did not end it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from .scripts import text


@dataclass(frozen=True, slots=True)
class Step:
    """A job came to `state`, at a moment of the server's clock, with so many tokens in its log.

    `worker` is who had it then, '' for nobody; `why` is the reason of a preempt, of an end, or of a restart that nobody
    asked for.
    """

    ms: int
    state: str
    epoch: int
    tokens: int
    worker: str = ""
    why: str = ""


def read_history(raw: str) -> tuple[Step, ...]:
    """Read the field `tl` of a job. A line that cannot be read is left out: this is only for the eye."""
    return tuple(step for line in raw.split("\n") if (step := _step(line)) is not None)


def _step(line: str) -> Step | None:
    try:
        ms, state, epoch, tokens, worker, *why = line.split(" ", 5)
        return Step(int(ms), state, int(epoch), int(tokens), "" if worker == "-" else worker, " ".join(why))
    except ValueError:
        return None


@dataclass(frozen=True, slots=True)
class Restart:
    """Attempt `epoch` of a job was given up in `state` by `worker`, or taken from it; `lost` tokens were discarded."""

    ms: int
    job: str
    epoch: int
    state: str
    worker: str
    why: str
    lost: int


def read_restarts(entries: Iterable[tuple[Any, Mapping[Any, Any]]]) -> list[Restart]:
    """Read entries of the stream `restarts`."""
    return [_restart(_ms(entry), _texts(fields)) for entry, fields in entries]


def _restart(ms: int, fields: Mapping[str, str]) -> Restart:
    return Restart(
        ms,
        job=fields.get("id", ""),
        epoch=int(fields.get("ep", 0)),
        state=fields.get("st", ""),
        worker=fields.get("ow", ""),
        why=fields.get("why", ""),
        lost=int(fields.get("lost", 0)),
    )


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """A job that was given up for its crashes. `spec` is empty where it was too long to be kept."""

    entry: str
    ms: int
    job: str
    why: str
    spec: bytes
    form: str


def read_letters(entries: Iterable[tuple[Any, Mapping[Any, Any]]]) -> list[DeadLetter]:
    """Read entries of the stream `dead`."""
    return [_letter(text(entry), _ms(entry), _texts(fields)) for entry, fields in entries]


def _letter(entry: str, ms: int, fields: Mapping[str, str]) -> DeadLetter:
    spec = fields.get("spec", "").encode()
    return DeadLetter(entry, ms, fields.get("id", ""), fields.get("why", ""), spec, fields.get("vw", ""))


def _ms(entry: Any) -> int:
    return int(text(entry).partition("-")[0])


def _texts(fields: Mapping[Any, Any]) -> dict[str, str]:
    return {text(name): text(value) for name, value in fields.items()}
