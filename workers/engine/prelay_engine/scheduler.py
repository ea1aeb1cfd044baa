"""Decide what one step does. Pure: sequences and numbers in, a plan out."""

from __future__ import annotations

from collections.abc import Sequence as Rows
from dataclasses import dataclass


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
class Chunk:
    key: str
    tokens: int


@dataclass(frozen=True, slots=True)
class Plan:
    """`evicted` go first, then `decode` rows take their blocks, then all run in one batch."""

    decode: tuple[str, ...] = ()
    chunks: tuple[Chunk, ...] = ()
    evicted: tuple[str, ...] = ()


def schedule(rows: Rows[Row], free_blocks: int, prefill_budget: int) -> Plan:
    """What the next step runs.

    1. In order of precedence (priority, reserved ones first within it, then arrival) each decoding row
       takes the blocks its next position needs. When none are free, victims go: the row of least
       precedence first, which may be the row itself; never a reserved one, which needs nothing either.
    2. Every decoding row that is left runs.
    3. Prompts are computed in the same order until `prefill_budget` tokens are spent; an urgent prompt may
       take the whole budget.
    """
    standing = sorted(rows, key=_precedence)
    evicted: list[str] = []
    done: list[Row] = []
    while standing:
        row = standing.pop(0)
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
        chunks=_chunks(done, prefill_budget),
        evicted=tuple(evicted),
    )


def _precedence(row: Row) -> tuple[int, bool, int, str]:
    return (row.priority, not row.reserved, row.arrival_ms, row.key)


def _victim(standing: list[Row]) -> Row | None:
    """The row of least precedence that may be evicted and holds something."""
    return next((row for row in reversed(standing) if not row.reserved and row.holds), None)


def _chunks(rows: list[Row], budget: int) -> tuple[Chunk, ...]:
    chunks = []
    for row in rows:
        tokens = min(row.todo, budget)
        if tokens:
            chunks.append(Chunk(row.key, tokens))
            budget -= tokens
    return tuple(chunks)
