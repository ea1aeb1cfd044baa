"""What a run does with what an earlier one left."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from ..errors import BadUsage
from .note import Note, path_of


class Course(Enum):
    BEGIN = "begin"
    GO_ON = "go on"
    OVER = "over"


@dataclass(frozen=True, slots=True)
class Wish:
    """What was asked for. `resume` allows an input that is not named."""

    output: Path
    resume: bool = False
    fresh: bool = False


def choose(wish: Wish, note: Note | None, digest: str | None) -> Course:
    """Decide by the note, and by the digest of the input where one is named. Raise BadUsage where it is unclear."""
    if wish.fresh:
        return Course.BEGIN
    if note is None:
        if digest is None:
            raise BadUsage(f"nothing to go on with: {path_of(wish.output)} is not there; name an input to begin")
        if wish.output.exists():
            raise BadUsage(
                f"{wish.output} is there already, and no run left it: use another -o, or --fresh to replace it"
            )
        return Course.BEGIN
    if digest is not None and digest != note.digest:
        raise BadUsage(
            f"{path_of(wish.output)} is of other lines ({note.input}, {note.batch or 'no batch yet'}): use another -o,"
            " --resume without an input to go on with those, or --fresh to begin anew"
        )
    if note.over and wish.output.exists():
        return Course.OVER
    if not note.batch and digest is None:
        raise BadUsage(f"the run of {note.input} ended before its batch was created: name the input again")
    return Course.GO_ON
