"""Drawing from long rows: never what weighs nothing, as often as it weighs, and from the right set."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diptych.engine.sampling import SamplingParams, distribution
from diptych.engine.sampling.random import invert_cdf

VOCAB = 49_152


@settings(max_examples=300, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    size=st.integers(1, 400),
    at=st.floats(0, 1, exclude_max=True),
    holes=st.sampled_from([0.0, 0.9, 0.999]),
    spread=st.sampled_from([0.0, 5.0, 60.0]),
)
def test_invert_cdf_never_gives_an_entry_of_weight_zero(
    seed: int, size: int, at: float, holes: float, spread: float
) -> None:
    rng = np.random.default_rng(seed)
    weights = np.exp(-spread * rng.random(size))
    weights[rng.random(size) < holes] = 0.0
    weights[rng.integers(size)] = 1.0
    for number in (at, 0.0, math.nextafter(1.0, 0.0)):
        assert weights[invert_cdf(weights, number)] > 0


@pytest.mark.parametrize("size", [1, 63, 64, 65, 127, 1000])
def test_invert_cdf_gives_entries_by_their_weights(size: int) -> None:
    weights = np.random.default_rng(size).random(size)
    steps = 40 * size
    drawn = np.bincount([invert_cdf(weights, n / steps) for n in range(steps)], minlength=size)
    # Evenly spaced numbers: each entry is met to within one.
    assert np.abs(drawn - steps * weights / weights.sum()).max() <= 1 + 1e-6


@pytest.mark.parametrize("peak", [0.5, 2.0, 12.0])
@pytest.mark.parametrize("top_p", [1e-6, 0.3, 0.9, 0.99, 0.999999])
def test_the_nucleus_of_a_long_row_is_that_of_a_sort(peak: float, top_p: float) -> None:
    scores = (np.random.default_rng(3).standard_normal(VOCAB) * peak).astype(np.float32)
    probabilities = np.exp(scores.astype(np.float64))
    probabilities /= probabilities.sum()
    order = np.argsort(-probabilities)
    count = int((probabilities[order].cumsum() - probabilities[order] < top_p).sum())
    ids, weights = distribution(scores, SamplingParams(top_p=top_p))
    # Rounding decides about the last few of very many tokens.
    assert abs(len(ids) - count) <= 1 + count // 10_000
    assert set(order[: min(count, len(ids))]) >= set(ids) or len(ids) > count
    assert weights / weights.sum() == pytest.approx(
        probabilities[ids] / probabilities[ids].sum(), rel=1e-3, abs=1e-9
    )


def test_of_equal_tokens_at_the_border_the_lower_ones_are_kept() -> None:
    for size in (10, 2000):
        ids, weights = distribution(np.zeros(size, np.float32), SamplingParams(top_p=0.45))
        assert ids.tolist() == list(range(math.ceil(0.45 * size)))
        assert set(weights) == {1.0}


@pytest.mark.parametrize("top_k", [1, 5, 100, 767, 768, 769, 40_000, VOCAB - 1])
def test_top_k_of_a_long_row_keeps_the_largest(top_k: int) -> None:
    scores = np.random.default_rng(4).standard_normal(VOCAB).astype(np.float32)
    ids, _ = distribution(scores, SamplingParams(top_k=top_k))
    smallest = np.sort(scores)[-top_k]
    assert ids.tolist() == np.flatnonzero(scores >= smallest).tolist()


def test_top_k_above_the_allowed_tokens_keeps_them_all() -> None:
    scores = np.full(VOCAB, -np.inf, np.float32)
    scores[[7, 900, 40_000]] = [1.0, 2.0, 0.0]
    for params in (SamplingParams(top_k=40), SamplingParams(), SamplingParams(top_p=0.999999)):
        ids, weights = distribution(scores, params)
        assert [int(i) for i, w in zip(ids, weights, strict=True) if w > 0] == [7, 900, 40_000]


def test_min_p_keeps_the_same_tokens_alone_and_after_top_p() -> None:
    scores = np.log(np.array([0.5, 0.25, 0.125, 0.0625, 0.0625], np.float32)) + 3
    for params, kept in (
        (SamplingParams(min_p=0.5), [0, 1]),
        (SamplingParams(min_p=0.6), [0]),
        (SamplingParams(min_p=0.2, top_p=0.6), [0, 1]),
        (SamplingParams(min_p=0.2, temperature=100.0), [0, 1, 2, 3, 4]),
    ):
        ids, _ = distribution(scores, params)
        assert ids.tolist() == kept


@pytest.mark.parametrize("temperature", [0.1, 1.0, 50.0])
@pytest.mark.parametrize("sigmas", [1e-3, 1.0, 3.0, 1000.0])
def test_top_n_sigma_keeps_what_is_near_the_largest_logit(sigmas: float, temperature: float) -> None:
    scores = np.random.default_rng(7).standard_normal(VOCAB).astype(np.float32)
    scores[::3] = -np.inf  # forbidden, and no part of the deviation
    possible = scores[np.isfinite(scores)].astype(np.float64)
    expected = np.flatnonzero(scores >= possible.max() - sigmas * possible.std())
    before = scores.copy()
    ids, weights = distribution(scores, SamplingParams(temperature=temperature, top_n_sigma=sigmas))
    assert set(ids[weights > 0.0]) <= set(expected)
    if temperature >= 1.0:
        assert set(ids[weights > 0.0]) == set(expected)
    assert (scores == before).all()


def test_top_n_sigma_of_equal_logits_keeps_all() -> None:
    ids, weights = distribution(np.zeros(100, np.float32), SamplingParams(top_n_sigma=0.5))
    assert len(ids) == 100
    assert (weights == 1.0).all()
