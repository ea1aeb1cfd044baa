"""The device draws the token that the host would draw."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from prelay_engine import sampler
from prelay_engine.gpu.kernels import sample as module
from prelay_engine.gpu.kernels.sample import sample
from prelay_engine.sampler import NO_TOKEN, Draw
from prelay_queue.job import Sampling

#: Beyond one tile of the kernel, and no multiple of anything.
VOCAB = 50257


def settings_of(seed: int = 0, **values: Any) -> Sampling:
    return Sampling(max_tokens=1, seed=seed, **values)


def drawn(
    logits: torch.Tensor, each: Sequence[Sampling], points: Sequence[float] | None = None, scratch: bool = True
) -> list[int]:
    """What the kernel draws for rows with these settings, at what the host's sampler would draw from their seeds."""
    rows = len(each)
    out = torch.full((rows,), -7)
    sample(
        logits,
        torch.tensor([one.temperature for one in each], dtype=torch.float32),
        torch.tensor([one.top_k for one in each], dtype=torch.int32),
        torch.tensor([one.top_p for one in each], dtype=torch.float64),
        torch.tensor([one.min_p for one in each], dtype=torch.float32),
        torch.tensor(points or [sampler.uniform(one.seed, 0) for one in each], dtype=torch.float64),
        out,
        torch.full((rows + 1, logits.shape[1] + 3), torch.nan) if scratch else None,
    )
    return out.tolist()


def expected(logits: torch.Tensor, each: Sequence[Sampling]) -> list[int]:
    return sampler.sample(logits, [Draw(one, 0) for one in each])


def exact_logits(rows: int, vocab: int, temperature: float, seed: int, step: float = 0.0) -> torch.Tensor:
    """Logits whose weights add up to the same in every order.

    All weights are above 2^-11, so multiples of 2^-35, and 2^16 of them at most are added up: that needs 51 bits of a
    float64's 53. With a `step` many are equal.
    """
    values = torch.rand(rows, vocab, generator=torch.Generator().manual_seed(seed)) * 7.5
    if step:
        values = (values / step).round() * step
    return values * temperature


@pytest.mark.parametrize("vocab", [1, 7, 1000, pytest.param(VOCAB, marks=pytest.mark.slow)])
@pytest.mark.parametrize("step", [0.0, 0.25])
@pytest.mark.parametrize(
    "values",
    [
        {},
        {"min_p": 0.125},
        {"top_k": 5},
        {"top_k": 20000},
        {"top_p": 0.7},
        {"top_p": 1e-9},
        {"top_p": 0.95, "top_k": 50},
        {"top_p": 0.3, "top_k": 900, "min_p": 0.01},
    ],
    ids=str,
)
def test_the_token_is_the_host_samplers_where_sums_are_exact(vocab: int, step: float, values: dict[str, Any]) -> None:
    # A temperature whose reciprocal is exact: weights have the same bits in both.
    rows = 1 if vocab == VOCAB else 3
    each = [settings_of(seed, temperature=0.5, **values) for seed in range(rows)]
    logits = exact_logits(rows, vocab, 0.5, seed=vocab, step=step)
    assert drawn(logits, each) == expected(logits, each)


@pytest.mark.slow
@settings(max_examples=25)
@given(
    vocab=st.integers(1, 200),
    seed=st.integers(0, 2**32),
    step=st.sampled_from([0.0, 0.5, 2.0]),
    temperature=st.sampled_from([0.25, 1.0, 4.0]),
    top_k=st.integers(-1, 220),
    top_p=st.one_of(st.just(1.0), st.floats(0.001, 1.0), st.sampled_from([0.25, 0.5, 0.75])),
    min_p=st.one_of(st.just(0.0), st.floats(0.001, 1.0)),
)
def test_any_settings_draw_what_the_host_draws(
    vocab: int, seed: int, step: float, temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    one = settings_of(seed, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    logits = exact_logits(1, vocab, temperature, seed, step)
    with patch.object(module, "_TILE", 32):  # several tiles even of few logits
        assert drawn(logits, [one]) == expected(logits, [one])


@pytest.mark.parametrize(
    "values",
    [
        {"temperature": 0.7},
        {"temperature": 1.3, "min_p": 0.001},
        {"temperature": 0.6, "top_k": 20, "top_p": 0.95},
        {"temperature": 0.9, "top_p": 0.9},
        {"temperature": 3.0, "top_p": 0.99},
        {"temperature": 1.7, "top_k": 30000},
    ],
    ids=str,
)
def test_of_any_logits_it_draws_the_hosts_token_or_its_neighbour_where_rounding_decides(
    values: dict[str, Any],
) -> None:
    each = [settings_of(seed, **values) for seed in range(2)]
    logits = torch.randn(2, VOCAB, generator=torch.Generator().manual_seed(1)) * 3
    for row, one, ours, theirs in zip(logits, each, drawn(logits, each), expected(logits, each), strict=True):
        if ours != theirs:
            assert differs_by_rounding(row.double().numpy(), one, ours, theirs)


def differs_by_rounding(row: np.ndarray, one: Sampling, ours: int, theirs: int) -> bool:
    """Whether these are neighbours among the tokens left, and the point lies between them but for rounding."""
    weights = np.exp((row - row.max()) / one.temperature)
    weights[weights < one.min_p] = 0
    left = sampler._kept(weights.astype(np.float32), one)
    left = left[weights[left] > 0]
    shares = np.cumsum(weights[left]) / weights[left].sum()
    places = sorted(np.searchsorted(left, (ours, theirs)).tolist())
    near = abs(float(shares[places[0]]) - sampler.uniform(one.seed, 0)) < 1e-6
    return {ours, theirs} <= set(left.tolist()) and places[1] - places[0] == 1 and near


def test_temperature_zero_and_top_k_one_take_the_greatest_and_of_equals_the_first() -> None:
    logits = torch.zeros(3, VOCAB)
    logits[:, [40000, 20001, 9000, 20000]] = 5.0
    logits[2, 1] = 5.5
    assert drawn(logits, [settings_of(temperature=0), settings_of(top_k=1), settings_of(temperature=0)]) == [
        9000
    ] * 2 + [1]


def test_a_row_without_a_distribution_gives_no_token_and_leaves_others_alone() -> None:
    logits = exact_logits(6, VOCAB, 1.0, seed=3)
    logits[0, VOCAB - 1] = torch.nan
    logits[1, 5] = torch.inf
    logits[2] = -torch.inf
    logits[3, :] = torch.nan
    each = [settings_of(seed, temperature=float(seed != 4)) for seed in range(6)]
    tokens = drawn(logits, each)
    assert tokens[:4] == [NO_TOKEN] * 4
    assert tokens[4:] == expected(logits[4:], each[4:])


@pytest.mark.slow
def test_of_equal_weights_at_the_bar_those_with_lower_ids_are_left() -> None:
    logits = torch.zeros(5, VOCAB)
    logits[:, VOCAB - 1] = 1.0
    top_k = settings_of(top_k=10000)  # the last, and 9999 of the others
    assert drawn(logits[:2], [top_k] * 2, [0.0, 1 - 2**-53]) == [0, VOCAB - 1]
    total = 9999 + np.e
    assert drawn(logits[:2], [top_k] * 2, [9998.5 / total, 9999.5 / total]) == [9998, VOCAB - 1]
    half = settings_of(top_p=0.5)  # the last, and as few others as make up half with it
    others = int(np.ceil(0.5 * (VOCAB - 1 + np.e) - np.e))
    assert drawn(logits[:2], [half] * 2, [(others - 0.5) / (others + np.e), (others + 0.5) / (others + np.e)]) == [
        others - 1,
        VOCAB - 1,
    ]


@pytest.mark.parametrize("values", [{}, {"top_k": 3}, {"top_p": 0.5}], ids=str)
def test_what_cannot_be_is_never_drawn_not_even_at_the_ends(values: dict[str, Any]) -> None:
    logits = torch.full((4, 1000), -torch.inf)
    logits[:, 300:310] = 1.0
    first, _, last, beyond = drawn(logits, [settings_of(**values)] * 4, [0.0, 0.3, 1 - 2**-53, 1.0])
    assert first == 300
    assert last == beyond == {"top_k": 302, "top_p": 304}.get("".join(values), 309)


def test_cold_and_hot_rows_are_drawn_without_overflow() -> None:
    logits = torch.tensor([[1.0, 3.0, 2.999, -1e38]] * 2)
    with np.errstate(over="ignore"):
        assert drawn(logits, [settings_of(temperature=1e-45), settings_of(temperature=1e30)], [0.9, 0.9]) == [1, 2]


def test_a_rows_token_does_not_depend_on_its_neighbours_or_on_where_it_lies() -> None:
    each = [
        settings_of(1, temperature=0.8),
        settings_of(2, top_k=40, top_p=0.9),
        settings_of(3, temperature=0),
        settings_of(4, temperature=1.5, top_p=0.97, min_p=0.001),
    ]
    wide = torch.randn(4, 9000, generator=torch.Generator().manual_seed(4)) * 3
    before, logits = wide.clone(), wide[:, 13:8990]
    together = drawn(logits, each)
    assert [drawn(row[None].clone(), [one])[0] for row, one in zip(logits, each, strict=True)] == together
    assert drawn(logits, each, scratch=False) == together
    assert torch.equal(wide, before), "logits are only read"


def test_without_rows_nothing_is_drawn() -> None:
    assert drawn(torch.zeros(0, 9), []) == []
