import itertools
import math
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diptych.bench.datasets.synthetic import RandomLengths
from diptych.bench.load import arrival_times


@given(st.integers(0, 60), st.floats(0.01, 1e4), st.floats(0.05, 50), st.integers(0, 1 << 40))
def test_starts_at_once_ascends_and_offers_exactly_the_rate(
    count: int, rate: float, burstiness: float, seed: int
) -> None:
    times = arrival_times(count, rate, burstiness, seed)
    assert len(times) == count
    assert times == sorted(times)
    assert times[:1] == [0.0][:count]
    if count > 1:
        assert times[-1] == pytest.approx((count - 1) / rate)
    assert times == arrival_times(count, rate, burstiness, seed)


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_gaps_vary_as_a_gamma_distribution_does(burstiness: float) -> None:
    times = arrival_times(40_000, 8.0, burstiness, seed=3)
    gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
    assert statistics.fmean(gaps) == pytest.approx(1 / 8)
    variation = statistics.pstdev(gaps) / statistics.fmean(gaps)
    assert variation == pytest.approx(1 / math.sqrt(burstiness), rel=0.05)


def test_poisson_gaps_are_exponential() -> None:
    """The share of gaps longer than t must be exp(-rate * t): a gamma of another shape fails this."""
    times = arrival_times(40_000, 2.0, 1.0, seed=5)
    gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
    for t in (0.1, 0.5, 1.0, 2.0):
        assert sum(gap > t for gap in gaps) / len(gaps) == pytest.approx(math.exp(-2 * t), abs=0.01)


def test_an_infinite_rate_sends_all_at_once() -> None:
    assert arrival_times(5, math.inf, 1.0, seed=0) == [0.0] * 5


@pytest.mark.parametrize(("rate", "burstiness"), [(0.0, 1.0), (-1.0, 1.0), (1.0, 0.0), (math.nan, 1.0)])
def test_refuses_what_is_no_rate(rate: float, burstiness: float) -> None:
    with pytest.raises(ValueError, match="positive"):
        arrival_times(5, rate, burstiness, seed=0)


def test_gaps_say_nothing_of_the_lengths_beside_them() -> None:
    """Ranges of 255 values: next to no draw is thrown away, so that the same stream would stay in step."""
    related = []
    for seed in range(5):
        lengths = [len(one.prompt) for one in RandomLengths(255, 127, 0.5).requests(64, seed)]
        gaps = [later - earlier for earlier, later in itertools.pairwise(arrival_times(64, 10.0, 1.0, seed))]
        related.append(statistics.correlation(lengths[:-1], gaps))
    assert abs(statistics.fmean(related)) < 0.2
