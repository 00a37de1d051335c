"""The workers of one supervisor, in a file without a name that its gateways inherit.

A directory that is away or takes no writes does not hear of a worker that was restarted meanwhile. Its
supervisor knows it: the record is in the line with which a worker announces itself.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Sequence

from diptych.runtime.discovery.records import WorkerRecord, record_from_json

_log = logging.getLogger(__name__)
_MAX_BYTES = 1 << 20


class WorkerFile:
    """The file as its one writer has it."""

    def __init__(self) -> None:
        self.fd = os.memfd_create("diptych-workers", os.MFD_CLOEXEC)

    def write(self, records: Sequence[str]) -> None:
        """Replace the content. A reader may see parts of two contents, which is no JSON: it reads again."""
        data = json.dumps(list(records)).encode()
        os.pwrite(self.fd, data, 0)
        os.ftruncate(self.fd, len(data))

    def close(self) -> None:
        os.close(self.fd)


class WorkerFileReader:
    """The file as a gateway reads it. ``fd`` is None where there is no supervisor."""

    def __init__(self, fd: int | None) -> None:
        self._fd = fd
        self._data = b""
        self._records: list[WorkerRecord] = []

    def workers(self) -> list[WorkerRecord]:
        """Return the records; those read last while the content is not whole."""
        if self._fd is None:
            return []
        data = os.pread(self._fd, _MAX_BYTES, 0)
        if data == self._data or not data:
            return self._records
        try:
            self._records = [record_from_json(text) for text in json.loads(data)]
            self._data = data
        except (ValueError, TypeError, RecursionError):
            _log.debug("the list of workers is being written")
        return self._records
