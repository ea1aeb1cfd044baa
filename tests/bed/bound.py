"""A condition to wait for, with the values it had when it was named."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar, TypeVarTuple

R = TypeVar("R")
Values = TypeVarTuple("Values")


def bound(what: Callable[[*Values], R], *values: *Values) -> Callable[[], R]:
    """`what` of these values: inside a loop a plain lambda would see those of a later round.

    Unlike a lambda's defaults and `functools.partial`, it tells a type checker what the values are.
    """
    return lambda: what(*values)
