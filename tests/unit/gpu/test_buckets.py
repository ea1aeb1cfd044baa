"""The batch sizes for which decode steps are captured."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prelay_engine.errors import ConfigError
from prelay_engine.gpu.buckets import Buckets

ROWS = st.integers(1, 1500)


def test_sizes_are_close_where_rows_are_few_and_go_up_to_the_most() -> None:
    assert Buckets(520).sizes == (
        *(1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128),
        *(160, 192, 224, 256, 320, 384, 448, 512, 520),
    )
    assert Buckets(64).sizes == (1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64)
    assert Buckets(3).sizes == (1, 2, 3)
    assert Buckets(1).sizes == (1,)
    assert repr(Buckets(5)) == "<Buckets 1, 2, 4, 5>"


@given(most=ROWS, rows=ROWS)
def test_a_batch_fits_the_smallest_bucket_that_holds_it_and_wastes_less_than_it_holds(most: int, rows: int) -> None:
    buckets = Buckets(most)
    found = buckets.fit(rows)
    if rows > most:
        assert found is None
        return
    assert found == min(size for size in buckets.sizes if size >= rows)
    assert found <= max(1.5 * rows, rows + 8)


def test_no_rows_have_no_bucket_and_no_buckets_are_refused() -> None:
    assert Buckets(8).fit(0) is None
    with pytest.raises(ConfigError, match="max_rows must be at least 1, not 0"):
        Buckets(0)
