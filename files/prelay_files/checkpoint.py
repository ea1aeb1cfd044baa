"""How far a run has come: which bytes of which runs count, and which lines are in them."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from pathlib import Path

import orjson

from .bitmap import Bitmap
from .errors import Damaged

RESULTS = "results.jsonl"
ERRORS = "errors.jsonl"
PARTS = (RESULTS, ERRORS)
#: The checkpoint's own file in a run's folder.
NAME = "checkpoint"


@dataclass(slots=True)
class Totals:
    """Lines of each kind, and the tokens of the answers."""

    completed: int = 0
    failed: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Link:
    """The beginning of one run's parts, in bytes. What stands behind it does not count."""

    run: str
    results: int
    errors: int

    def size(self, part: str) -> int:
        return self.results if part == RESULTS else self.errors


@dataclass(slots=True)
class Checkpoint:
    """Everything in it is on disk. `chain` is in the order of the runs; no line stands in it twice."""

    chain: tuple[Link, ...] = ()
    done: Bitmap = field(default_factory=Bitmap)
    totals: Totals = field(default_factory=Totals)

    def encode(self) -> bytes:
        """A line of JSON, then the bitmap."""
        bits, totals = self.done.encode(), self.totals
        head = {
            "chain": [[link.run, link.results, link.errors] for link in self.chain],
            "totals": [totals.completed, totals.failed, totals.prompt_tokens, totals.completion_tokens],
            "digest": _digest(bits),
        }
        return orjson.dumps(head) + b"\n" + bits

    @classmethod
    def decode(cls, raw: bytes) -> Checkpoint:
        """Raise Damaged unless it is one, whole."""
        head, _, bits = raw.partition(b"\n")
        try:
            found = orjson.loads(head)
            chain = tuple(Link(str(run), int(results), int(errors)) for run, results, errors in found["chain"])
            totals = Totals(*map(int, found["totals"]))
            digest = found["digest"]
        except (ValueError, TypeError, KeyError) as error:
            raise Damaged(f"not a checkpoint ({error}): {head[:100]!r}") from None
        done = Bitmap(bits)
        if digest != _digest(bits) or len(done) != totals.completed + totals.failed:
            raise Damaged(f"a checkpoint says {totals} and has the bits of {len(done)} lines")
        return cls(chain, done, totals)

    def check_parts(self, batch: Path) -> None:
        """Raise Damaged where a part is shorter than it was."""
        for link in self.chain:
            for part in PARTS:
                path, size = batch / link.run / part, link.size(part)
                found = path.stat().st_size if path.exists() else 0
                if found < size:
                    raise Damaged(f"{path} had {size} bytes and has {found}")


def _digest(bits: bytes) -> str:
    return hashlib.blake2b(bits, digest_size=8).hexdigest()
