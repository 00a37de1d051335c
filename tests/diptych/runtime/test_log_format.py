"""Records of the log as lines of text and of JSON."""

from __future__ import annotations

import json
import logging
import sys

import pytest

from diptych.runtime.log_format import JsonFormatter, OneLineFormatter


def record(message: str, *args: object, fails: bool = False) -> logging.LogRecord:
    found = None
    if fails:
        try:
            raise ValueError("two\nlines")
        except ValueError:
            found = sys.exc_info()
    made = logging.LogRecord("gateway.call", logging.WARNING, "call.py", 1, message, args, found)
    made.created = 1_764_324_000.25
    return made


def test_json_line_has_members_and_the_requests_id() -> None:
    line = JsonFormatter("gateway", "g-1").format(record('request %s: "%s"\nends', "req-7", "é"))
    assert "\n" not in line
    assert json.loads(line) == {
        "time": "2025-11-28T10:00:00.250Z",
        "level": "warning",
        "program": "gateway",
        "worker_id": "g-1",
        "logger": "gateway.call",
        "message": 'request req-7: "é"\nends',
        "request_id": "req-7",
    }


@pytest.mark.parametrize("args", [(), ("requests",)])
def test_record_about_no_request_has_no_id(args: tuple[object, ...]) -> None:
    message = "the %s are read" if args else "request %s"
    assert "request_id" not in json.loads(JsonFormatter("gateway", "g-1").format(record(message, *args)))


def test_exception_is_a_member_or_in_the_line() -> None:
    failed = record("it failed", fails=True)
    assert json.loads(JsonFormatter("decode", "d").format(failed))["exception"].endswith("two\nlines")
    text = OneLineFormatter("decode", "d").format(record("it failed", fails=True))
    assert "\n" not in text
    assert "decode/d gateway.call: it failed ⏎ Traceback" in text
