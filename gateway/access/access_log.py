"""Access and audit log: a line of JSON for each call, written by a thread of its own.

A slow or full disk delays no call: lines that find `MAX_LINES` before them are dropped, and counted. A line
is appended by one write, so that gateways may share a file. When another file has its name, as after a
rotation, that one is opened.
"""

from __future__ import annotations

import datetime
import json
import logging
import os
import queue
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from gateway.access.call_record import CallRecord

STDOUT: Final = "-"
MAX_LINES: Final = 65_536
"""Lines that may wait for the disk."""
_LOOK_EVERY_S: Final = 1.0
_CLOSE_S: Final = 2.0
_MODE: Final = 0o600
_log = logging.getLogger(__name__)


def line_of(record: CallRecord, gateway_id: str, at: datetime.datetime) -> str:
    """Return the record as a line, with its end."""
    usage = record.usage
    members: dict[str, object] = {
        "time": at.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
        "gateway": gateway_id,
        "kind": record.scope.value,
        "request_id": record.request_id,
        "tenant": record.tenant,
        "key": record.key,
        "method": record.method,
        "status": record.status,
        "reason": record.reason,
        "http_status": record.http_status,
        "duration_ms": round(record.duration_s * 1e3, 3),
        "model": usage.model or None,
        "input_tokens": usage.input_tokens,
        "cached_tokens": usage.cached_tokens,
        "output_tokens": usage.output_tokens,
        "trace_id": record.trace_id or None,
    }
    if record.target:
        members["target"] = record.target
    return json.dumps(members, ensure_ascii=True, separators=(",", ":")) + "\n"


def check_path(path: str) -> None:
    """Raise ValueError unless the log can be appended to."""
    if path == STDOUT:
        return
    try:
        os.close(_open(path))
    except OSError as error:
        raise ValueError(f"cannot write {path}: {error.strerror}") from None


class AccessLog:
    """Open log.

    Args:
        path: of the file; "-" is standard output.
        dropped: is called for each line that was dropped.
    """

    def __init__(self, path: str, gateway_id: str, dropped: Callable[[], object]) -> None:
        """Open the file. Raises OSError."""
        self._path = path
        self._gateway_id = gateway_id
        self._dropped = dropped
        self._descriptor = sys.stdout.fileno() if path == STDOUT else _open(path)
        self._looked_at = time.monotonic()
        self._failed = False
        self._lines: queue.Queue[str | None] = queue.Queue(MAX_LINES)
        self._thread = threading.Thread(target=self._run, name="access-log", daemon=True)
        self._thread.start()

    def write(self, record: CallRecord) -> None:
        """Queue a line. Never waits."""
        try:
            self._lines.put_nowait(line_of(record, self._gateway_id, datetime.datetime.now(datetime.UTC)))
        except queue.Full:
            self._dropped()

    def close(self) -> None:
        """Write what is queued, and end; a disk that takes nothing is not waited for."""
        try:
            self._lines.put(None, timeout=_CLOSE_S)
        except queue.Full:
            return
        self._thread.join(_CLOSE_S)

    def _run(self) -> None:
        while (line := self._lines.get()) is not None:
            try:
                self._reopen_if_rotated()
                _write_all(self._descriptor, line.encode())
                self._failed = False
            except OSError as error:
                self._dropped()
                if not self._failed:
                    _log.error("the access log loses lines: %s", error)
                self._failed = True
        if self._path != STDOUT:
            os.close(self._descriptor)

    def _reopen_if_rotated(self) -> None:
        now = time.monotonic()
        if self._path == STDOUT or now < self._looked_at + _LOOK_EVERY_S:
            return
        self._looked_at = now
        try:
            there = os.stat(self._path)
        except FileNotFoundError:
            there = None
        mine = os.fstat(self._descriptor)
        if there is None or (there.st_dev, there.st_ino) != (mine.st_dev, mine.st_ino):
            fresh = _open(self._path)
            os.close(self._descriptor)
            self._descriptor = fresh


def _open(path: str) -> int:
    return os.open(Path(path), os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, _MODE)


def _write_all(descriptor: int, data: bytes) -> None:
    while data:
        data = data[os.write(descriptor, data) :]
