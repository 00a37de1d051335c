"""Errors that workers logged within a test."""

from __future__ import annotations

import logging

import pytest

_OURS = {"asyncio", "decode_worker", "diptych", "kvtransfer", "prefill_worker"}
"""Loggers that workers can make speak; an exporter thread of another test may still complain meanwhile."""


def complaints(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Return the messages of the workers' records, of the level that the test has set."""
    return [
        record.getMessage()
        for record in caplog.records
        if record.name.split(".")[0] in _OURS and not _wakes_a_closed_loop(record)
    ]


def _wakes_a_closed_loop(record: logging.LogRecord) -> bool:
    """Return whether gRPC's poller, one for the process, wakes the loop of a test that is over."""
    error = record.exc_info[1] if record.exc_info else None
    return "PollerCompletionQueue" in record.getMessage() and str(error) == "Event loop is closed"
