"""Percentiles, the knee of a load's curve, service levels."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from diptych.bench.figures import ServiceLevel, find_knee, parse_service_level, percentile
from tests.diptych.bench.outcomes import answered, failed

LIMIT = st.none() | st.floats(1, 5000)
MOMENTS = st.lists(st.floats(0.001, 5), min_size=1, max_size=6).map(sorted)
VALUES = st.lists(st.floats(-1e9, 1e9), min_size=1, max_size=50)


@given(VALUES, st.floats(0, 100))
def test_percentile_is_numpys(values: list[float], percent: float) -> None:
    expected = float(np.percentile(values, percent))
    assert percentile(sorted(values), percent) == pytest.approx(expected, rel=1e-9, abs=1e-6)


def test_percentile_of_nothing_is_not_a_number() -> None:
    assert math.isnan(percentile([], 50))


def served(load: float, limit: float, service_s: float) -> tuple[float, float]:
    """A closed loop of `load` clients: beyond `limit` only latency grows (Little's law)."""
    throughput = min(load / service_s, limit)
    return throughput, load / throughput


def test_knee_is_where_throughput_stops_to_grow() -> None:
    loads = [1, 2, 4, 8, 16, 32]
    assert find_knee([served(load, limit=80, service_s=0.1) for load in loads]) == loads.index(8)


def test_knee_is_not_found_below_saturation() -> None:
    assert find_knee([served(load, limit=1000, service_s=0.1) for load in (1, 2, 4, 8)]) is None


@pytest.mark.parametrize("points", [[], [(1.0, 1.0)] * 2, [(1.0, 1.0), (2.0, 0.0), (3.0, 5.0)]])
def test_knee_needs_three_loads_with_latencies(points: list[tuple[float, float]]) -> None:
    assert find_knee(points) is None


@given(LIMIT, LIMIT, LIMIT, MOMENTS)
def test_service_level_is_met_when_every_limit_is_kept(
    ttft: float | None, tpot: float | None, e2el: float | None, arrivals: list[float]
) -> None:
    kept = ttft is None or arrivals[0] * 1000 <= ttft
    kept = kept and (e2el is None or arrivals[-1] * 1000 <= e2el)
    if tpot is not None and len(arrivals) > 1:
        kept = kept and (arrivals[-1] - arrivals[0]) / (len(arrivals) - 1) * 1000 <= tpot
    assert ServiceLevel(ttft, tpot, e2el).met_by(answered(arrivals)) is kept


def test_a_failed_request_meets_no_service_level() -> None:
    assert not ServiceLevel().met_by(failed("UNAVAILABLE"))


def test_service_level_is_read_from_flags() -> None:
    assert parse_service_level(["ttft:500", "tpot:50.5"]) == ServiceLevel(ttft=500, tpot=50.5)


@pytest.mark.parametrize("texts", [["ttft"], ["itl:5"], ["ttft:x"], ["ttft:0"], ["ttft:5", "ttft:6"]])
def test_service_level_refuses_other_flags(texts: list[str]) -> None:
    with pytest.raises(ValueError, match=repr(texts[-1])):
        parse_service_level(texts)
