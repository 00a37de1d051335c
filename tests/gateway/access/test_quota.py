"""What a key may use, on a clock of our own."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diptych.runtime.errors import QuotaExceeded
from gateway.access.quota import BUSY_RETRY_S, Quota, QuotaUsage


def refusal(meter: QuotaUsage, prompt_tokens: int, now: float) -> QuotaExceeded:
    running = meter.running
    with pytest.raises(QuotaExceeded) as caught:
        meter.begin(prompt_tokens, now)
    assert meter.running == running
    return caught.value


def test_without_a_quota_everything_goes() -> None:
    meter = QuotaUsage("k")
    for _ in range(1000):
        meter.begin(10**9, 0.0)
    assert meter.running == 1000


def test_requests_at_the_limit_and_one_above() -> None:
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


def test_running_requests_at_the_limit_and_one_above() -> None:
    meter = QuotaUsage("k", Quota(concurrent_requests=2))
    meter.begin(1, 0.0)
    meter.begin(1, 0.0)
    assert refusal(meter, 1, 0.0).retry_after_s == BUSY_RETRY_S
    meter.end(5)
    meter.begin(1, 0.0)
    refusal(meter, 1, 1e9)


def test_prompt_tokens_count_at_once_and_output_tokens_at_the_end() -> None:
    meter = QuotaUsage("k", Quota(tokens_per_minute=600))
    meter.begin(500, 0.0)
    meter.begin(100, 0.0)
    assert refusal(meter, 1, 0.0).retry_after_s == pytest.approx(0.1)
    meter.end(50)
    meter.end(150)  # 200 are owed: 20 s, and 1 s for ten more
    assert refusal(meter, 10, 0.0).retry_after_s == pytest.approx(21.0)
    meter.begin(10, 21.1)


def test_a_prompt_longer_than_a_minutes_tokens_waits_for_a_full_bucket_and_is_paid_for_later() -> None:
    meter = QuotaUsage("k", Quota(tokens_per_minute=60))
    meter.begin(300, 0.0)
    assert refusal(meter, 1, 0.0).retry_after_s == pytest.approx(241.0)
    assert refusal(meter, 300, 241.0).retry_after_s == pytest.approx(59.0)
    meter.begin(300, 300.1)


def test_what_the_server_had_no_room_for_costs_nothing() -> None:
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
def test_how_many_can_ever_begin_at_once(quota: Quota, most: int | None) -> None:
    assert quota.most_together == most
    meter = QuotaUsage("k", quota)
    meter.require(most or 10**6, 0, 0.0)
    meter.require(most or 10**6, 0, 0.0)  # it counts nothing
    if most is not None:
        meter.begin(1, 0.0)
        with pytest.raises(QuotaExceeded):
            meter.require(most, 0, 0.0)


@given(st.integers(1, 1000), st.lists(st.tuples(st.floats(0, 5), st.integers(1, 100)), max_size=200))
def test_no_more_than_a_bucket_and_what_flows_in(per_minute: int, arrivals: list[tuple[float, int]]) -> None:
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
