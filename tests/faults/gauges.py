"""The load gauges of one worker, read over one connection that stays."""

from __future__ import annotations

import http.client

from tests.end_to_end.stack import BLOCK_GAUGES, REQUEST_GAUGES


class Gauges:
    """Those of a decode worker: its requests and its blocks."""

    def __init__(self, http_port: int) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", http_port, timeout=5)

    def close(self) -> None:
        self._connection.close()

    def busy(self) -> dict[str, float]:
        """Those that are not zero. Raises OSError."""
        self._connection.request("GET", "/metrics")
        found = {}
        for line in self._connection.getresponse().read().decode().splitlines():
            if line.startswith(REQUEST_GAUGES + BLOCK_GAUGES) and (value := float(line.rsplit(" ", 1)[1])):
                found[line.rsplit(" ", 1)[0]] = value
        return found
