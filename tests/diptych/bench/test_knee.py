import pytest

from diptych.bench.knee import knee


def served(load: float, limit: float, service_s: float) -> tuple[float, float]:
    """A closed loop of `load` clients: beyond `limit` only latency grows (Little's law)."""
    throughput = min(load / service_s, limit)
    return throughput, load / throughput


def test_is_where_throughput_stops_to_grow() -> None:
    loads = [1, 2, 4, 8, 16, 32]
    assert knee([served(load, limit=80, service_s=0.1) for load in loads]) == loads.index(8)


def test_is_not_found_below_saturation() -> None:
    assert knee([served(load, limit=1000, service_s=0.1) for load in (1, 2, 4, 8)]) is None


@pytest.mark.parametrize("points", [[], [(1.0, 1.0)] * 2, [(1.0, 1.0), (2.0, 0.0), (3.0, 5.0)]])
def test_needs_three_loads_with_latencies(points: list[tuple[float, float]]) -> None:
    assert knee(points) is None
