"""How full a pool is. No torch and no numpy here: workers without a model import this too."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class BlockStats:
    """Blocks by state. `orphaned` are owned by no live sequence and must be 0; they also count in their state."""

    total: int
    free: int
    copying: int = 0
    leased: int = 0  # in use or held
    cached: int = 0  # full, held by nobody, and kept for texts that begin alike
    orphaned: int = 0

    @property
    def available(self) -> int:
        """What an admission can count on: cached blocks are handed out when none is free."""
        return self.free + self.cached
