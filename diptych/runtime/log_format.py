"""Forms of a record in the log, one line each: text for people, JSON for collectors of logs."""

from __future__ import annotations

import json
import logging
from datetime import UTC, datetime
from typing import Final

_OF_REQUEST: Final = "request %s"
"""Beginning of a record's message whose first argument is the id of a request."""


class OneLineFormatter(logging.Formatter):
    """Formatter of one line a record: time, level, program and worker, logger, message, exception."""

    def __init__(self, program: str, worker_id: str) -> None:
        super().__init__(
            f"%(asctime)s.%(msecs)03d %(levelname).1s {program}/{worker_id} %(name)s: %(message)s", "%H:%M:%S"
        )

    def format(self, record: logging.LogRecord) -> str:
        return super().format(record).replace("\r", "").replace("\n", " ⏎ ")


class JsonFormatter(logging.Formatter):
    """Formatter of a JSON object a record.

    Members are time (RFC 3339, UTC), level, program, worker_id, logger and message; where there are such,
    request_id and exception.
    """

    def __init__(self, program: str, worker_id: str) -> None:
        super().__init__()
        self._program = program
        self._worker_id = worker_id

    def format(self, record: logging.LogRecord) -> str:
        time = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        members: dict[str, object] = {
            "time": time.replace("+00:00", "Z"),
            "level": record.levelname.lower(),
            "program": self._program,
            "worker_id": self._worker_id,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if (request_id := request_id_of(record)) is not None:
            members["request_id"] = request_id
        if record.exc_info:
            members["exception"] = self.formatException(record.exc_info)
        return json.dumps(members)


def request_id_of(record: logging.LogRecord) -> str | None:
    """Return the id of the request that a record is about; None where it names none."""
    if not (isinstance(record.args, tuple) and record.args and str(record.msg).startswith(_OF_REQUEST)):
        return None
    return str(record.args[0])
