"""Timeouts of a shutdown, from flags, variables and --set."""

from __future__ import annotations

import pytest

from diptych.cli.preflight import ShutdownTimeouts, check_options, shutdown_timeouts
from diptych.cli.stack import parse_override
from diptych.cli.stack_options import StackOptions


def times(options: StackOptions) -> ShutdownTimeouts:
    return shutdown_timeouts(check_options(options))


def test_kill_after_is_longer_than_any_shutdown_timeout() -> None:
    assert times(StackOptions()) == ShutdownTimeouts(8.0, 10.0)
    assert times(StackOptions(shutdown_timeout=30.0)) == ShutdownTimeouts(30.0, 32.0)
    assert times(StackOptions(worker_shutdown_timeout=20.0)) == ShutdownTimeouts(8.0, 22.0)
    longer = StackOptions(overrides=(parse_override("decode.worker-shutdown-timeout=60"),))
    assert times(longer) == ShutdownTimeouts(8.0, 62.0)


def test_kill_after_includes_the_lame_duck_of_the_gateway(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DIPTYCH_LAME_DUCK", "5")
    assert times(StackOptions(worker_shutdown_timeout=1.0)) == ShutdownTimeouts(8.0, 15.0)
