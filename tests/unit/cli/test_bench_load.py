"""What `prelay bench serve` sends, and when: lengths, arrivals, prompts."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prelay.bench.arrivals import arrivals
from prelay.bench.lengths import parse_lengths
from prelay.bench.parse import counts, numbers, size
from prelay.bench.workload import Ask, RandomPrompts, chosen, parse_ids, read_file
from prelay.errors import BadUsage


def draws(text: str, count: int = 4000) -> list[int]:
    rng = np.random.default_rng(1)
    lengths = parse_lengths(text, "--input-len")
    return [lengths.draw(rng) for _ in range(count)]


def test_a_fixed_length_is_that_length() -> None:
    assert set(draws("128", 10)) == {128}


def test_uniform_lengths_reach_both_ends_and_nothing_beyond() -> None:
    found = draws("uniform:3-7")
    assert set(found) == {3, 4, 5, 6, 7}
    assert np.mean(found) == pytest.approx(5, abs=0.1)


def test_lognormal_lengths_have_their_median_and_sigma_and_stop_at_the_most() -> None:
    found = draws("lognormal:200,0.5")
    assert np.median(found) == pytest.approx(200, rel=0.05)
    assert np.log(found).std() == pytest.approx(0.5, rel=0.05)
    assert max(draws("lognormal:200,0.5,300")) == 300


@pytest.mark.parametrize("sigma", ["3", "5.5"])
def test_no_length_is_below_one(sigma: str) -> None:
    assert min(draws(f"lognormal:1,{sigma}")) == 1


@pytest.mark.parametrize("text", ["", "0", "-1", "1.5", "uniform:5-2", "uniform:0-2", "normal:3", "lognormal:0,1", "x"])
def test_other_lengths_are_refused_by_name(text: str) -> None:
    with pytest.raises(BadUsage, match=r"--input-len must be a number, uniform:LOW-HIGH"):
        parse_lengths(text, "--input-len")


@given(st.floats(0.1, 1000), st.floats(0.05, 50), st.integers(1, 200), st.integers(0, 99))
def test_arrivals_rise_and_there_are_as_many_as_asked_for(rate: float, burst: float, count: int, seed: int) -> None:
    times = arrivals(rate, burst, np.random.default_rng(seed), count=count)
    assert len(times) == count
    assert times == sorted(times)
    assert times[0] >= 0
    within = arrivals(rate, burst, np.random.default_rng(seed), duration_s=20 / rate)
    assert within == sorted(within)
    assert all(0 <= at < 20 / rate for at in within)


@pytest.mark.parametrize(("burstiness", "spread"), [(1, 1.0), (0.25, 2.0), (4, 0.5), (10_000, 0.01)])
def test_gaps_have_the_mean_of_the_rate_and_the_spread_of_the_burstiness(burstiness: float, spread: float) -> None:
    gaps = np.diff(arrivals(50, burstiness, np.random.default_rng(3), count=20_000))
    assert gaps.mean() == pytest.approx(1 / 50, rel=0.05)
    assert gaps.std() / gaps.mean() == pytest.approx(spread, rel=0.05)


def take(asks: Iterator[Ask], count: int) -> list[Ask]:
    return list(itertools.islice(asks, count))


def random_prompts(shared: int = 0, seed: int = 5) -> RandomPrompts:
    fixed = parse_lengths("20", "-")
    return RandomPrompts(fixed, parse_lengths("uniform:1-9", "-"), shared, seed, (100, 200))


def test_prompts_are_the_same_for_a_seed_and_others_for_each_level() -> None:
    first = take(random_prompts()(1), 5)
    assert first == take(random_prompts()(1), 5)
    assert first != take(random_prompts()(2), 5)
    assert first != take(random_prompts(seed=6)(1), 5)
    assert all(len(ask.prompt) == 20 and set(ask.prompt) <= set(range(100, 200)) for ask in first)
    assert all(1 <= ask.output <= 9 for ask in first)


def test_a_shared_prefix_is_shared_by_all_levels_and_the_rest_is_not() -> None:
    asks = [*take(random_prompts(12)(1), 3), *take(random_prompts(12)(2), 3)]
    assert len({tuple(ask.prompt[:12]) for ask in asks}) == 1
    assert len({tuple(ask.prompt[12:]) for ask in asks}) == 6
    assert {len(ask.prompt) for ask in asks} == {20}


def test_a_prompt_is_never_the_shared_prefix_alone() -> None:
    assert {len(ask.prompt) for ask in take(random_prompts(50)(1), 3)} == {51}


def test_a_file_is_read_in_its_order_again_and_again_and_levels_go_on_in_it(tmp_path: Path) -> None:
    lines = [{"prompt": "one", "output_len": 3}, {"prompt": [4, 5]}, {"prompt": "three", "output_len": 1}]
    file = tmp_path / "asks.jsonl"
    file.write_text("\n".join(map(json.dumps, lines)) + "\n\n")
    workload = read_file(file, parse_lengths("64", "-"), 0)
    assert take(workload(1), 2) == [Ask("one", 3), Ask([4, 5], 64)]
    assert take(workload(2), 2) == [Ask("three", 1), Ask("one", 3)]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{", "line 2: not valid JSON"),
        ("[]", 'line 2: needs "prompt"'),
        ('{"prompt": ""}', 'line 2: needs "prompt"'),
        ('{"prompt": []}', 'line 2: needs "prompt"'),
        ('{"prompt": [1, -2]}', 'line 2: needs "prompt"'),
        ('{"prompt": [1, "x"]}', 'line 2: needs "prompt"'),
        ('{"prompt": "a", "output_len": 0}', 'line 2: "output_len" must be a whole number'),
        ('{"prompt": "a", "output_len": true}', 'line 2: "output_len" must be a whole number'),
    ],
)
def test_a_line_that_is_no_request_is_named(tmp_path: Path, line: str, words: str) -> None:
    file = tmp_path / "asks.jsonl"
    file.write_text(f'{{"prompt": "fine"}}\n{line}\n')
    with pytest.raises(BadUsage, match=words):
        read_file(file, parse_lengths("64", "-"), 0)


def test_a_file_that_is_missing_or_empty_is_said(tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    for name, words in (("none", "No such file"), ("empty", "is empty")):
        with pytest.raises(BadUsage, match=words):
            read_file(tmp_path / name, parse_lengths("64", "-"), 0)
    with pytest.raises(BadUsage, match="--shared-prefix"):
        chosen(str(tmp_path), parse_lengths("1", "-"), parse_lengths("1", "-"), 5, 0, "1-2")


def test_lists_and_sizes_are_read_or_refused_by_name() -> None:
    assert counts("1,8,32", "--concurrency") == (1, 8, 32)
    assert counts("", "--concurrency") == ()
    assert numbers("0.5,2", "--rate") == (0.5, 2)
    assert [size(text, "-") for text in ("1GB", "1.5 KiB", "7")] == [10**9, 1536, 7]
    assert parse_ids("100-200") == (100, 200)
    for read, text in (
        (counts, "1,0"), (counts, "1.5"), (counts, "1,"), (numbers, "0"), (numbers, "a"), (numbers, "inf"),
        (numbers, "1,,2"), (size, "1TB"), (size, "0GB"), (size, "B"),
    ):  # fmt: skip
        with pytest.raises(BadUsage, match=f"--it must be .*, not '{text}'"):
            read(text, "--it")
    for wrong in ("5", "5-5", "9-1"):
        with pytest.raises(BadUsage, match="--token-ids must be LOW-HIGH"):
            parse_ids(wrong)
