"""The batch sizes for which decoding is captured. Pure."""

from __future__ import annotations

from bisect import bisect_left

from ..errors import ConfigError

#: From and up to how many rows a bucket follows each so many: few rows are the common case, where padding costs most.
_STEPS = ((8, 64, 8), (64, 128, 16), (128, 256, 32))
#: Rows between buckets beyond those.
_LAST_STEP = 64


class Buckets:
    """Sizes 1, 2, 4, 8, 16, … up to `max_rows`, which is the last. Raises ConfigError for less than one row."""

    def __init__(self, max_rows: int) -> None:
        if max_rows < 1:
            raise ConfigError("max_rows", "at least 1", max_rows)
        #: Rising.
        self.sizes = _sizes(max_rows)

    @property
    def max_rows(self) -> int:
        return self.sizes[-1]

    def fit(self, rows: int) -> int | None:
        """The smallest bucket that holds so many rows; None for no rows, or more than any holds."""
        if not 0 < rows <= self.max_rows:
            return None
        return self.sizes[bisect_left(self.sizes, rows)]

    def __repr__(self) -> str:
        return f"<Buckets {', '.join(map(str, self.sizes))}>"


def _sizes(max_rows: int) -> tuple[int, ...]:
    sizes = [1, 2, 4]
    for first, stop, step in _STEPS:
        sizes += range(first, stop, step)
    sizes += range(256, max_rows, _LAST_STEP)
    return (*(size for size in sizes if size < max_rows), max_rows)
