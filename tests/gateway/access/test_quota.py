"""Quota usage on a scripted clock."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diptych.runtime.errors import QuotaExceeded
from gateway.access.quota import BUSY_RETRY_S, BatchQuota, Quota, QuotaUsage


def refusal(meter: QuotaUsage, prompt_tokens: int, now: float) -> QuotaExceeded:
    running = meter.running
    with pytest.raises(QuotaExceeded) as caught:
        meter.begin(prompt_tokens, now)
    assert meter.running == running
    return caught.value


def test_quota_usage_without_limits_never_refuses() -> None:
    meter = QuotaUsage("k")
    for _ in range(1000):
        meter.begin(10**9, 0.0)
    assert meter.running == 1000


def test_requests_per_minute_refuse_above_the_limit() -> None:
    meter = QuotaUsage("k", Quota(requests_per_minute=30))
    for _ in range(30):
        meter.begin(1, 100.0)
        meter.end(1)
    error = refusal(meter, 1, 100.0)
    assert error.retry_after_s == pytest.approx(2.0)
    assert error.quota == "30 requests a minute"
    assert error.subject == "key:k"
    meter.begin(1, 102.0)
    refusal(meter, 1, 102.0)


def test_concurrent_requests_refuse_above_the_limit() -> None:
    meter = QuotaUsage("k", Quota(concurrent_requests=2))
    meter.begin(1, 0.0)
    meter.begin(1, 0.0)
    assert refusal(meter, 1, 0.0).retry_after_s == BUSY_RETRY_S
    meter.end(5)
    meter.begin(1, 0.0)
    refusal(meter, 1, 1e9)


def test_tokens_per_minute_charge_prompt_at_begin_and_output_at_end() -> None:
    meter = QuotaUsage("k", Quota(tokens_per_minute=600))
    meter.begin(500, 0.0)
    meter.begin(100, 0.0)
    assert refusal(meter, 1, 0.0).retry_after_s == pytest.approx(0.1)
    meter.end(50)
    meter.end(150)  # 200 are owed: 20 s, and 1 s for ten more
    assert refusal(meter, 10, 0.0).retry_after_s == pytest.approx(21.0)
    meter.begin(10, 21.1)


def test_prompt_above_tokens_per_minute_needs_a_full_bucket() -> None:
    meter = QuotaUsage("k", Quota(tokens_per_minute=60))
    meter.begin(300, 0.0)
    assert refusal(meter, 1, 0.0).retry_after_s == pytest.approx(241.0)
    assert refusal(meter, 300, 241.0).retry_after_s == pytest.approx(59.0)
    meter.begin(300, 300.1)


def test_refused_request_is_refunded() -> None:
    meter = QuotaUsage("k", Quota(requests_per_minute=1, tokens_per_minute=10, concurrent_requests=1))
    for _ in range(5):
        meter.begin(10, 0.0)
        meter.refused(10)
    meter.begin(10, 0.0)
    refusal(meter, 1, 0.0)


@pytest.mark.parametrize(
    ("quota", "most"),
    [
        (Quota(), None),
        (Quota(tokens_per_minute=5), None),
        (Quota(requests_per_minute=5), 5),
        (Quota(requests_per_minute=5, concurrent_requests=3), 3),
    ],
)
def test_most_together_is_the_smaller_limit(quota: Quota, most: int | None) -> None:
    assert quota.most_together == most
    meter = QuotaUsage("k", quota)
    meter.require(most or 10**6, 0, 0.0)
    meter.require(most or 10**6, 0, 0.0)  # it counts nothing
    if most is not None:
        meter.begin(1, 0.0)
        with pytest.raises(QuotaExceeded):
            meter.require(most, 0, 0.0)


@given(st.integers(1, 1000), st.lists(st.tuples(st.floats(0, 5), st.integers(1, 100)), max_size=200))
def test_token_bucket_bounds_the_tokens_taken(per_minute: int, arrivals: list[tuple[float, int]]) -> None:
    meter = QuotaUsage("k", Quota(tokens_per_minute=per_minute))
    now, taken, longest = 0.0, 0, 0
    hints: list[float | None] = []
    for pause, tokens in arrivals:
        now += pause
        try:
            meter.begin(tokens, now)
        except QuotaExceeded as error:
            hints.append(error.retry_after_s)
            continue
        taken, longest = taken + tokens, max(longest, tokens)
    assert taken <= per_minute + now * per_minute / 60 + longest + 1e-6
    assert all(hint is not None and hint > 0 for hint in hints)


BATCH_QUOTA = Quota(requests_per_minute=4, tokens_per_minute=100, concurrent_requests=4)


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


def test_batch_quota_charges_all_requests_at_once() -> None:
    meter = QuotaUsage("k", BATCH_QUOTA)
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
def test_batch_quota_refunds_an_unserved_batch(served: bool) -> None:
    meter = QuotaUsage("k", BATCH_QUOTA)
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
