from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from diptych.bench.drive import Run
from diptych.bench.figures import ServiceLevel
from diptych.bench.measurement import latencies, measure, most_at_once
from diptych.bench.request import Outcome, ServerTimes
from diptych.bench.self_watch import Strain
from tests.diptych.bench.outcomes import answered, failed

CALM = Strain(cpu_share=0.1, loop_share=0.1, lag_p50_ms=0.1, lag_p99_ms=0.5, lag_max_ms=1.0)


def run(outcomes: Sequence[Outcome], duration: float) -> Run:
    return Run(tuple(outcomes), duration, CALM)


def test_measures_as_its_definitions_say() -> None:
    outcomes = [
        answered([0.5, 0.6, 0.9], prompt=10),  # ttft 500, gaps 100 and 300, e2e 900
        answered([1.2, 1.4], sent=1.0, tokens=5, prompt=30),  # ttft 200, gap 200, tpot 200 / 4
        failed("QUEUE_FULL"),
    ]
    figures = measure(run(outcomes, 2.0), ServiceLevel(ttft=300), exact_lengths=True).figures
    assert figures["completed"] == 2
    assert figures["failed"] == 1
    assert figures["total_input_tokens"] == 40
    assert figures["total_output_tokens"] == 8
    assert figures["request_throughput"] == 1.0
    assert figures["output_throughput"] == 4.0
    assert figures["input_throughput"] == 20.0
    assert figures["total_token_throughput"] == 24.0
    assert figures["request_goodput"] == 0.5
    assert figures["mean_ttft_ms"] == pytest.approx(350)
    assert figures["mean_itl_ms"] == pytest.approx(200)
    assert figures["mean_tpot_ms"] == pytest.approx((200 + 50) / 2)
    assert figures["mean_e2el_ms"] == figures["mean_e2e_latency_ms"] == pytest.approx((900 + 400) / 2)
    assert figures["tokens_per_message"] == pytest.approx(8 / 5)


def test_pace_of_a_user_and_price_of_a_token() -> None:
    outcomes = [answered([1.0, 1.5, 2.0], prompt=5), answered([1.0, 1.25], prompt=5), answered([3.0])]
    measured = measure(run(outcomes, 3.0), None, exact_lengths=True, price_hour=1.2).figures
    assert measured["output_throughput_per_user"] == pytest.approx((2 + 4) / 2)
    assert measured["dollars_per_million_output_tokens"] == pytest.approx(1.2 * 3 / 3600 * 1e6 / 6)
    assert measured["dollars_per_million_tokens"] == pytest.approx(1.2 * 3 / 3600 * 1e6 / (6 + 13))
    unpriced = measure(run([answered([1.0])], 3.0), None, exact_lengths=True).figures
    assert "dollars_per_million_tokens" not in unpriced
    assert unpriced["output_throughput_per_user"] is None


def test_the_best_second_is_that_with_most_tokens() -> None:
    """Seconds from the first sending; tokens that came in one message count as of its moment."""
    outcomes = [answered([10.5, 11.1, 11.9, 12.2], sent=10.0), answered([11.5, 12.5], sent=10.1, tokens=6)]
    most = measure(run(outcomes, 2.5), None, exact_lengths=True).figures["max_output_tokens_per_s"]
    assert most == 2 + 3
    empty = measure(run([failed("A")], 1.0), None, exact_lengths=True).figures
    assert empty["max_output_tokens_per_s"] == 0


def test_failures_are_counted_by_code_and_not_timed() -> None:
    measured = measure(run([failed("A"), failed("B"), failed("A")], 1.0), None, exact_lengths=True)
    assert measured.errors == {"A": 2, "B": 1}
    assert measured.figures["mean_ttft_ms"] is None
    assert measured.figures["request_goodput"] is None
    assert measured.figures["output_throughput"] == 0.0


@pytest.mark.parametrize(("exact", "short"), [(True, 1), (False, 0)])
def test_counts_answers_that_are_too_short(exact: bool, short: int) -> None:
    outcomes = [answered([1.0, 2.0], asked=3), answered([1.0, 2.0], asked=2)]
    assert measure(run(outcomes, 2.0), None, exact_lengths=exact).figures["short_outputs"] == short


def test_shows_what_a_diptych_server_says_of_itself_and_nothing_for_others() -> None:
    times = ServerTimes(queue=0.003, prefill=0.040, handoff=0.005, kv_transfer=0.002)
    figures = measure(run([answered([1.0], server=times)], 1.0), None, exact_lengths=True).figures
    assert figures["median_handoff_ms"] == pytest.approx(5)
    assert figures["p99_kv_transfer_ms"] == pytest.approx(2)
    others = measure(run([answered([1.0])], 1.0), None, exact_lengths=True).figures
    assert "median_handoff_ms" not in others


@given(st.lists(st.floats(0, 100), min_size=1, max_size=40))
def test_latencies_are_numpys_in_milliseconds(seconds: list[float]) -> None:
    figures = latencies("x", seconds)
    values = 1000 * np.array(seconds)
    assert figures["mean_x_ms"] == pytest.approx(values.mean(), abs=1e-6)
    assert figures["std_x_ms"] == pytest.approx(values.std(), abs=1e-3)
    for kind, percent in (("median", 50), ("p90", 90), ("p99", 99)):
        assert figures[f"{kind}_x_ms"] == pytest.approx(np.percentile(values, percent), abs=1e-6)


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(1, 10)), min_size=1, max_size=15))
def test_counts_most_requests_at_once(spans: list[tuple[int, int]]) -> None:
    outcomes = [answered([start + length], sent=start) for start, length in spans]
    at_each = [sum(start <= t < start + length for start, length in spans) for t in range(31)]
    assert most_at_once(outcomes) == max(at_each)
