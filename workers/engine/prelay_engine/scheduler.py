"""Decide what one step does. Pure: sequences and numbers in, a plan out."""

from __future__ import annotations

from collections.abc import Sequence as Rows
from dataclasses import dataclass

#: From this priority on a row gives way to others.
BATCH = 2


@dataclass(frozen=True, slots=True)
class Row:
    """A running sequence as the scheduler sees it."""

    key: str
    priority: int  # lower is more urgent
    arrival_ms: int
    reserved: bool  # holds all the blocks it will ever need; is never a victim
    todo: int  # prompt tokens still to be computed; 0 means it decodes
    needs: int  # blocks that its next decode position needs and that it does not hold
    holds: int  # blocks that come free if it is evicted


@dataclass(frozen=True, slots=True)
class Limits:
    """How much one step may take. None is as much as there is."""

    tokens: int  # of prompts
    batch_tokens: int | None = None  # those of them that are of class batch
    batch_rows: int | None = None  # decoding rows of class batch
    kept_tokens: int = 0  # of `tokens`: for prompts of class batch only
    rows: int | None = None  # of all classes, whether they decode or are prompts; at least 1


@dataclass(frozen=True, slots=True)
class Chunk:
    key: str
    tokens: int


@dataclass(frozen=True, slots=True)
class Plan:
    """`evicted` go first, then `decode` rows take their blocks, then all run in one batch."""

    decode: tuple[str, ...] = ()
    chunks: tuple[Chunk, ...] = ()
    evicted: tuple[str, ...] = ()


def schedule(rows: Rows[Row], free_blocks: int, limits: Limits) -> Plan:
    """What the next step runs.

    1. In order of precedence (priority, reserved ones first within it, then arrival) each decoding row
       takes the blocks its next position needs. When none are free, victims go: the row of least
       precedence first, which may be the row itself; never a reserved one, which needs nothing either.
       Batch rows beyond `limits.batch_rows`, and all beyond `limits.rows`, pause: they keep what they hold, unless
       they are victims.
    2. Every decoding row that is left runs.
    3. Prompts are computed in the same order until `limits.tokens` are spent; an urgent prompt may take all that
       are not kept, those of class batch together `limits.batch_tokens`.
    """
    standing = sorted(rows, key=precedence)
    paused = _paused(standing, limits)
    evicted: list[str] = []
    done: list[Row] = []
    while standing:
        row = standing.pop(0)
        if row.key in paused:
            continue
        while row.needs > free_blocks:
            victim = _victim(standing) or row
            if victim is not row:
                standing.remove(victim)
            evicted.append(victim.key)
            free_blocks += victim.holds
            if victim is row:
                break
        else:
            free_blocks -= row.needs
            done.append(row)
    return Plan(
        decode=tuple(row.key for row in done if not row.todo),
        chunks=_chunks(done, limits),
        evicted=tuple(evicted),
    )


def precedence(row: Row) -> tuple[int, bool, int, str]:
    """Sorts the most urgent first."""
    return (row.priority, not row.reserved, row.arrival_ms, row.key)


def _victim(standing: list[Row]) -> Row | None:
    """The row of least precedence that may be evicted and holds something."""
    return next((row for row in reversed(standing) if not row.reserved and row.holds), None)


def _paused(rows: list[Row], limits: Limits) -> set[str]:
    """The first go on, so that they end: none is paused for ever while others come."""
    paused: set[str] = set()
    if limits.batch_rows is not None:
        decoding = [row.key for row in rows if row.priority >= BATCH and not row.todo]
        paused.update(decoding[limits.batch_rows :])
    if limits.rows is not None:
        others = [row.key for row in rows if row.key not in paused]
        paused.update(others[limits.rows :])
    return paused


def _chunks(rows: list[Row], limits: Limits) -> tuple[Chunk, ...]:
    chunks, left = [], limits.tokens
    batch_left = left if limits.batch_tokens is None else limits.batch_tokens
    for row in rows:
        batch = row.priority >= BATCH
        tokens = min(row.todo, min(left, batch_left) if batch else max(0, left - limits.kept_tokens))
        if tokens:
            chunks.append(Chunk(row.key, tokens))
            left -= tokens
            batch_left -= tokens if batch else 0
    return tuple(chunks)
