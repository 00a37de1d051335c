"""Several prompts of one call on one key."""

from __future__ import annotations

import pytest

from diptych.runtime.errors import QuotaExceeded
from gateway.access.batch_quota import BatchQuota
from gateway.access.quota import Quota, QuotaUsage

QUOTA = Quota(requests_per_minute=4, tokens_per_minute=100, concurrent_requests=4)


def left(meter: QuotaUsage) -> tuple[int, int]:
    """Requests and tokens that may still begin at once."""
    counts = []
    for one in ((1, 0), (0, 1)):
        count = 0
        while count < 100:
            try:
                meter.require(one[0] * (count + 1), one[1] * (count + 1), 0.0)
            except QuotaExceeded:
                break
            count += 1
        counts.append(count)
    return counts[0], counts[1]


def test_its_places_are_taken_at_once() -> None:
    meter = QuotaUsage("k", QUOTA)
    many = BatchQuota(meter, 3, 0.0)
    assert meter.running == 3
    with pytest.raises(QuotaExceeded):
        BatchQuota(meter, 2, 0.0)
    assert meter.running == 3
    for _ in range(3):
        many.require(1, 0, 0.0)
        many.begin(60, 0.0)  # the last ones overdraw the minute
    with pytest.raises(QuotaExceeded):
        meter.begin(1, 0.0)
    for _ in range(3):
        many.end(0)
    many.close(served=True)
    assert meter.running == 0
    with pytest.raises(QuotaExceeded):
        meter.begin(1, 40.0)
    meter.begin(1, 49.0)  # 180 were taken of 100, at 100 a minute


@pytest.mark.parametrize("served", [False, True])
def test_what_it_costs_in_the_end(served: bool) -> None:
    meter = QuotaUsage("k", QUOTA)
    many = BatchQuota(meter, 4, 0.0)
    many.begin(10, 0.0)
    many.begin(20, 0.0)
    many.begin(30, 0.0)
    many.refused(30)
    many.end(5)
    many.end(0)
    many.close(served=served)  # one prompt had not begun
    assert meter.running == 0
    assert left(meter) == ((2, 65) if served else (4, 100))
