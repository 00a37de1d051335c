"""The figures of short prompts: percentiles, tables over rounds, and a scene's arithmetic."""

from __future__ import annotations

import pytest

from lab.short_prompts import Times, figures, percentile, server, table


def test_percentile_is_the_nearest_rank() -> None:
    values = [float(n) for n in range(100)]
    assert (percentile(values, 50), percentile(values, 99), percentile([3.0], 99)) == (50.0, 99.0, 3.0)
    with pytest.raises(ValueError, match="no values"):
        percentile([], 50)


def test_figures_leave_out_what_was_not_measured() -> None:
    times = Times(asked=4, local=3, itl=[0.010, 0.020])
    times.busy["cached"].append(0.1)
    assert figures(times) == {
        "busy, cached: TTFT p50 ms": pytest.approx(100.0),
        "streams beside: ITL p50 ms": pytest.approx(20.0),
        "streams beside: ITL p99 ms": pytest.approx(20.0),
        "short prompts computed locally, %": 75.0,
    }


def test_table_has_medians_and_ratios_within_rounds() -> None:
    rounds = {("auto", "tcp"): [{"x": 1.0}, {"x": 3.0}], ("never", "tcp"): [{"x": 2.0}, {"x": 2.0}]}
    assert list(table(rounds))[-1] == "| x | 2.0 | 2.0 | 1.00 |"


def test_systems_differ_in_the_mode_alone() -> None:
    one, other = (server(mode, "tcp", "auto", "bundled").arguments for mode in ("auto", "never"))
    differing = [pair for pair in zip(one, other, strict=True) if pair[0] != pair[1]]
    assert differing == [("gateway.local-prefill=auto", "gateway.local-prefill=never")]
