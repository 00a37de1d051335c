import pytest
from hypothesis import given
from hypothesis import strategies as st

from diptych.bench.goodput import ServiceLevel, parse_service_level
from tests.diptych.bench.outcomes import answered, failed

LIMIT = st.none() | st.floats(1, 5000)
MOMENTS = st.lists(st.floats(0.001, 5), min_size=1, max_size=6).map(sorted)


@given(LIMIT, LIMIT, LIMIT, MOMENTS)
def test_is_met_when_every_limit_is_kept(
    ttft: float | None, tpot: float | None, e2el: float | None, arrivals: list[float]
) -> None:
    kept = ttft is None or arrivals[0] * 1000 <= ttft
    kept = kept and (e2el is None or arrivals[-1] * 1000 <= e2el)
    if tpot is not None and len(arrivals) > 1:
        kept = kept and (arrivals[-1] - arrivals[0]) / (len(arrivals) - 1) * 1000 <= tpot
    assert ServiceLevel(ttft, tpot, e2el).met_by(answered(arrivals)) is kept


def test_a_failed_request_meets_none() -> None:
    assert not ServiceLevel().met_by(failed("UNAVAILABLE"))


def test_is_read_from_flags() -> None:
    assert parse_service_level(["ttft:500", "tpot:50.5"]) == ServiceLevel(ttft=500, tpot=50.5)


@pytest.mark.parametrize("texts", [["ttft"], ["itl:5"], ["ttft:x"], ["ttft:0"], ["ttft:5", "ttft:6"]])
def test_refuses_other_flags(texts: list[str]) -> None:
    with pytest.raises(ValueError, match=repr(texts[-1])):
        parse_service_level(texts)
