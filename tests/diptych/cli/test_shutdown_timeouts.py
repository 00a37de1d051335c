"""What requests get at the end, and how long the supervisor waits for it: from flags, variables and --set."""

from __future__ import annotations

import pytest

from diptych.cli.preflight import check_options
from diptych.cli.shutdown_timeouts import DrainTimes, drain_times
from diptych.cli.stack import parse_override
from diptych.cli.stack_options import StackOptions


def times(options: StackOptions) -> DrainTimes:
    return drain_times(check_options(options))


def test_patience_is_longer_than_what_any_process_was_told() -> None:
    assert times(StackOptions()) == DrainTimes(8.0, 10.0)
    assert times(StackOptions(drain_grace_s=30.0)) == DrainTimes(30.0, 32.0)
    assert times(StackOptions(drain_s=20.0)) == DrainTimes(8.0, 22.0)
    longer = StackOptions(overrides=(parse_override("decode.drain-s=60"),))
    assert times(longer) == DrainTimes(8.0, 62.0)


def test_a_gateways_time_to_be_noticed_counts_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DIPTYCH_DRAIN_SETTLE_S", "5")
    assert times(StackOptions(drain_s=1.0)) == DrainTimes(8.0, 15.0)
