"""What `prelay bench` makes of what it saw: percentiles, targets, goodput."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prelay.bench.figures import Sample, Slo, parse_slo, quantiles, summary
from prelay.bench.goodput import Search
from prelay.errors import BadUsage


def sample(ttft_ms: float = 100, tpot_ms: float = 10, tokens: int = 11, why: str = "") -> Sample:
    ttft = ttft_ms / 1000
    return Sample(0.0, why, ttft, ttft + tpot_ms / 1000 * (tokens - 1), 7, tokens, 3, (0.01, 0.02))


def test_tpot_is_the_time_after_the_first_token_over_the_tokens_after_it() -> None:
    assert Sample(0, ttft=0.5, e2e=1.5, tokens_out=11).tpot == pytest.approx(0.1)
    assert Sample(0, ttft=0.5, e2e=0.5, tokens_out=1).tpot is None


def test_percentiles_lie_between_neighbours() -> None:
    found = quantiles(n / 1000 for n in range(101))
    assert found == {"mean": 50, "p50": 50, "p90": 90, "p99": 99}
    assert quantiles([0.001, 0.002]) == {"mean": 1.5, "p50": 1.5, "p90": 1.9, "p99": 1.99}
    assert quantiles([]) is None


@given(st.lists(st.floats(0, 1000), min_size=1))
def test_percentiles_rise_and_stay_within_what_was_seen(values: list[float]) -> None:
    found = quantiles(values, 1)
    assert found is not None
    slack = 1e-3  # three decimals are kept
    assert min(values) - slack <= found["p50"] <= found["p90"] <= found["p99"] <= max(values) + slack


def test_a_request_must_meet_all_targets_together() -> None:
    slo = Slo({"ttft": 100, "tpot": 10})
    assert slo.met(sample(100, 10))
    assert not slo.met(sample(101, 1))
    assert not slo.met(sample(1, 11))
    assert slo.attainment([sample(1, 11), sample(101, 1), sample(), sample()]) == 0.5


def test_a_failure_is_a_miss_and_one_token_has_no_tpot_to_miss() -> None:
    slo = Slo({"ttft": 100, "tpot": 10})
    assert not slo.met(sample(1, 1, why="status 503: full"))
    assert slo.met(Sample(0, ttft=0.05, e2e=0.05, tokens_out=1))
    assert slo.attainment([]) == 0


def test_targets_are_read_and_nonsense_is_named() -> None:
    assert parse_slo("ttft=500, tpot=50.5").targets == {"ttft": 500, "tpot": 50.5}
    for wrong in ("", "ttft", "ttft=", "ttft=0", "ttft=-1", "itl=5", "ttft=nan"):
        with pytest.raises(BadUsage, match="--slo must be like"):
            parse_slo(wrong)


def test_a_summary_counts_failures_by_their_reason_and_nothing_else_of_them() -> None:
    failed = [Sample(0.0, "status 400: no"), Sample(0.0, "status 503: full"), Sample(0.0, "status 503: full")]
    found = summary([sample(100), sample(200), *failed], 2.0, Slo({"ttft": 150}))
    assert (found["requests"], found["ok"], found["failed"]) == (5, 2, 3)
    assert list(found["failures"].items()) == [("status 503: full", 2), ("status 400: no", 1)]
    assert (found["tokens_in"], found["tokens_out"], found["tokens_out_per_s"]) == (14, 22, 11)
    assert (found["requests_per_s"], found["tokens_cached"]) == (1, 6)
    assert found["ttft_ms"]["p50"] == 150
    assert found["itl_ms"]["mean"] == 15
    assert found["attainment"] == 0.2
    assert found["tokens_from"] == "usage"


def test_a_level_without_an_answer_has_figures_too() -> None:
    found = summary([], 0.0, None)
    assert (found["requests"], found["tokens_out_per_s"], found["ttft_ms"]) == (0, 0, None)
    assert "attainment" not in found


def tried(limit: float, begin: float) -> tuple[Search, list[float]]:
    search, rates = Search(begin), []
    while not search.done:
        rates.append(search.rate)
        search.tell(search.rate <= limit)
    return search, rates


def test_the_search_doubles_and_then_halves_what_lies_between() -> None:
    search, rates = tried(5.0, 1.0)
    assert rates[:5] == [1, 2, 4, 8, 6]
    assert search.low <= 5 < search.high
    _, rates = tried(0.3, 1.0)
    assert rates[:3] == [1, 0.5, 0.25]


@given(st.floats(0.5, 500), st.floats(0.5, 20))
def test_the_goodput_is_the_highest_rate_met_and_one_close_above_it_was_too_much(limit: float, begin: float) -> None:
    search, rates = tried(limit, begin)
    assert search.bounded
    assert search.low == max(rate for rate in rates if rate <= limit)
    assert search.high == min(rate for rate in rates if rate > limit)
    assert search.high <= search.low * 1.05
    assert len(rates) < 30


def test_the_search_ends_where_no_rate_is_met_or_none_too_much() -> None:
    search, _ = tried(0.0, 4.0)
    assert search.low == 0
    search, _ = tried(math.inf, 4.0)
    assert not search.bounded
    assert search.low == 4 * 1024
