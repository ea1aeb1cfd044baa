from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from prelay_engine import sampler
from prelay_engine.demo import default_cache
from prelay_engine.native.build import library
from prelay_engine.native.lib import Kernels
from prelay_engine.sampler import NO_TOKEN, Draw, uniform
from prelay_queue.job import Sampling

_kernels: list[Kernels | None] = [None]


@pytest.fixture(scope="module", params=["native", "numpy"], autouse=True)
def way(request: pytest.FixtureRequest) -> None:
    """Each test draws in both ways."""
    _kernels[0] = Kernels(library(default_cache(), print), 2) if request.param == "native" else None


def sample(logits: torch.Tensor, draws: list[Draw]) -> list[int]:
    return sampler.sample(logits, draws, _kernels[0])


VOCAB = 1003  # neither a multiple of a vector's length nor of the sampler's blocks


def logits(rows: int = 1, seed: int = 0, scale: float = 3.0) -> torch.Tensor:
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * scale


def settings_of(**values: float) -> Sampling:
    return Sampling(max_tokens=1, **values)  # type: ignore[arg-type]


def exact_distribution(row: torch.Tensor, sampling: Sampling) -> npt.NDArray[np.float64]:
    """What the sampler should draw from, computed the plain way: sort, cut, normalise."""
    values = row.double().numpy()
    weights = np.exp((values - values.max()) / sampling.temperature)
    order = sorted(range(len(values)), key=lambda i: (-values[i], i))
    if sampling.top_k:
        order = order[: sampling.top_k]
    if sampling.top_p < 1:
        total, kept, held = sum(weights[i] for i in order), [], 0.0
        for i in order:
            kept.append(i)
            held += weights[i]
            if held >= sampling.top_p * total:
                break
        order = kept
    chances: npt.NDArray[np.float64] = np.zeros(len(values))
    chances[order] = weights[order]
    chances /= chances.sum()
    return chances


def test_temperature_zero_takes_the_best_and_of_equals_the_first() -> None:
    row = torch.tensor([[0.0, 5.0, 5.0, 1.0]])
    assert sample(row, [Draw(settings_of(temperature=0), 0)]) == [1]


@pytest.mark.parametrize(
    "values",
    [
        {"temperature": 1.0},
        {"temperature": 0.7, "top_k": 5},
        {"temperature": 1.3, "top_p": 0.8},
        {"temperature": 2.0, "top_p": 0.95, "top_k": 700},
        {"temperature": 5.0, "top_p": 0.97},
    ],
)
def test_what_is_drawn_follows_the_exact_distribution(values: dict[str, float]) -> None:
    sampling, draws = settings_of(seed=11, **values), 10_000
    row = logits(seed=5, scale=2.0)
    expected = exact_distribution(row[0], sampling) * draws
    drawn = np.bincount([sample(row, [Draw(sampling, seq)])[0] for seq in range(draws)], minlength=VOCAB)

    assert not drawn[expected == 0].any(), "a token outside top_k or top_p was drawn"
    common = expected >= 5
    observed = np.append(drawn[common], drawn[~common].sum())
    wanted = np.append(expected[common], expected[~common].sum())
    observed, wanted = observed[wanted > 0], wanted[wanted > 0]
    chi2, freedom = float((((observed - wanted) ** 2) / wanted).sum()), len(wanted) - 1
    # Wilson and Hilferty: the cube root of χ²/k is nearly normal. 4 sigma is passed by chance once in 30,000 runs.
    z = ((chi2 / freedom) ** (1 / 3) - (1 - 2 / (9 * freedom))) / np.sqrt(2 / (9 * freedom))
    assert abs(z) < 4, f"χ² is {chi2:.0f} at {freedom} degrees of freedom"


@given(
    seed=st.integers(0, 2**64 - 1),
    seq=st.integers(0, 10_000),
    place=st.integers(0, 4),
    temperature=st.sampled_from([0.0, 0.3, 1.0, 2.0]),
    top_p=st.sampled_from([0.2, 0.9, 1.0]),
    top_k=st.sampled_from([0, 1, 7, 900]),
)
@settings(deadline=None)
def test_a_token_does_not_depend_on_its_neighbours_or_its_place(
    seed: int, seq: int, place: int, temperature: float, top_p: float, top_k: int
) -> None:
    draw = Draw(settings_of(temperature=temperature, top_p=top_p, top_k=top_k, seed=seed), seq)
    row = logits(seed=seq)
    batch = logits(rows=5, seed=1)
    batch[place] = row[0]
    draws = [Draw(settings_of(seed=i), i) for i in range(5)]
    draws[place] = draw
    assert sample(batch, draws)[place] == sample(row, [draw])[0]


@given(st.integers(0, 2**64 - 1), st.integers(0, 2**40))
def test_the_uniform_number_lies_in_its_interval_and_is_reproducible(seed: int, seq: int) -> None:
    assert 0 <= uniform(seed, seq) < 1
    assert uniform(seed, seq) == uniform(seed, seq)


def test_the_uniform_number_is_the_same_in_every_release() -> None:
    assert uniform(0, 0) == 0.0740015493158257
    assert uniform(2**64 - 1, 7) == 0.16985289204026144


def test_seeds_and_seqs_give_different_numbers() -> None:
    assert len({uniform(seed, seq) for seed in range(40) for seq in range(40)}) == 1600


@pytest.mark.parametrize("point", [0.0, 0.5, 1 - 2**-53])
def test_a_token_of_no_weight_is_never_drawn(point: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("prelay_engine.sampler.uniform", lambda *_: point)
    row = torch.full((1, VOCAB), -1e4)
    row[0, [3, 500]] = 1.0
    assert sample(row, [Draw(settings_of(), 0)])[0] in (3, 500)


@pytest.mark.parametrize("temperature", [1e-45, 1e-30, 1e-3, 100.0])
def test_extreme_temperatures_give_a_token(temperature: float) -> None:
    row = logits()
    token = sample(row, [Draw(settings_of(temperature=temperature, seed=3), 0)])[0]
    assert 0 <= token < VOCAB
    if temperature < 1e-2:
        assert token == int(row.argmax())


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_row_that_is_no_distribution_gives_no_token_and_harms_no_other(bad: float) -> None:
    rows = logits(rows=2)
    expected = sample(rows[1:], [Draw(settings_of(seed=9), 4)])
    rows[0, 17] = bad
    drawn = sample(rows, [Draw(settings_of(), 0), Draw(settings_of(seed=9), 4)])
    assert drawn == [NO_TOKEN, *expected]


def test_top_k_beyond_the_vocabulary_and_top_p_of_one_cut_nothing() -> None:
    row = logits()
    free = [sample(row, [Draw(settings_of(seed=1), seq)]) for seq in range(50)]
    assert free == [sample(row, [Draw(settings_of(seed=1, top_k=10**6), seq)]) for seq in range(50)]


@given(
    seed=st.integers(0, 2**64 - 1),
    temperature=st.sampled_from([0.0, 0.3, 1.0, 5.0]),
    top_p=st.sampled_from([0.1, 0.9, 0.999, 1.0]),
    top_k=st.sampled_from([0, 1, 7, 600, 1003]),
    min_p=st.sampled_from([0.0, 0.05]),
    scale=st.sampled_from([0.0, 0.01, 3.0, 50.0]),
)
@settings(deadline=None)
def test_both_ways_draw_the_same(
    seed: int, temperature: float, top_p: float, top_k: int, min_p: float, scale: float
) -> None:
    """Their exponentials differ in the last bit, which moves the borders of a token by less than one in a million."""
    draw = Draw(settings_of(temperature=temperature, top_p=top_p, top_k=top_k, min_p=min_p, seed=seed), 3)
    row = logits(seed=seed % 1000, scale=scale)
    other = sampler.sample(row, [draw])
    if sample(row, [draw]) != other:
        nearby = [uniform(seed, 3) + step for step in (-1e-6, 1e-6)]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sampler, "uniform", lambda *_: nearby[0])
            below = sample(row, [draw])
            patch.setattr(sampler, "uniform", lambda *_: nearby[1])
            above = sample(row, [draw])
        assert other in (below, above)
