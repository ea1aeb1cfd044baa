"""From the input file to lines that can be run, or are refused: each line once, in the order of the file."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import BinaryIO

from prelay_files.bitmap import Bitmap
from prelay_text.batch_line import Refusal, custom_id_of, doubled, read_line, refused
from prelay_text.errors import RequestError
from prelay_text.resolve import Limits, check_model, resolve
from prelay_text.tokenizer import Tokenizer

from .life import Line
from .source import MAX_LINE_BYTES, Seen, lines_of


@dataclass(frozen=True, slots=True)
class Unfit:
    """A line that is not run."""

    number: int
    refusal: Refusal


@dataclass(frozen=True, slots=True)
class Ask:
    """What a batch asks for, and of whom. `limits` are those of the fleet as it is now."""

    batch_id: str
    endpoint: str
    model: str
    tokenizer: Tokenizer
    limits: Callable[[], Limits]


class Reader:
    """The lines of a batch that are not done. Iterate over it: None for a line that was done before.

    Lines that are done are looked at all the same, for their custom_id may come again.
    """

    def __init__(self, ask: Ask, file: BinaryIO, total: int, done: Bitmap) -> None:
        self.exhausted = False
        self._ask = ask
        self._done = done
        self._seen = Seen(total)
        self._lines = lines_of(file)
        self._unrun: tuple[str, str] | None = None

    def __repr__(self) -> str:
        return f"Reader({self._ask.batch_id}, exhausted={self.exhausted})"

    def run_no_more(self, code: str, message: str) -> None:
        """What is read from now on is refused for this reason, unless there is a nearer one."""
        self._unrun = code, message

    def __iter__(self) -> Iterator[Line | Unfit | None]:
        return self

    def __next__(self) -> Line | Unfit | None:
        for number, raw in self._lines:
            return self._read(number, raw)
        self.exhausted = True
        raise StopIteration

    def _read(self, number: int, raw: bytes | None) -> Line | Unfit | None:
        if number in self._done:
            if raw is not None and (custom_id := custom_id_of(raw)) is not None:
                self._seen.add(custom_id)
            return None
        if raw is None:
            message = f"the line has more than the {MAX_LINE_BYTES} bytes that a line may have"
            return Unfit(number, Refusal(None, "line_too_long", message))
        found = read_line(raw, self._ask.endpoint)
        if found.custom_id is not None and not self._seen.add(found.custom_id):
            return Unfit(number, doubled(found.custom_id))
        if isinstance(found, Refusal):
            return Unfit(number, found)
        if self._unrun is not None:
            return Unfit(number, Refusal(found.custom_id, *self._unrun))
        try:
            check_model(found.request, self._ask.model)
            seed = spare_seed(self._ask.batch_id, number)
            parts = resolve(found.request, self._ask.tokenizer, self._ask.limits(), spare_seed=seed)
        except RequestError as error:
            return Unfit(number, refused(found.custom_id, error))
        return Line(number, found.custom_id, found.request, parts, len(raw))


def spare_seed(batch_id: str, number: int) -> int:
    """The seed of a line that names none: the same whoever runs the line, and however often."""
    return int.from_bytes(hashlib.blake2b(f"{batch_id}-{number}".encode(), digest_size=8).digest(), "little")
