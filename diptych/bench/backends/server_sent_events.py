"""Parser of server-sent events, from the pieces that the network delivers (WHATWG HTML, section 9.2)."""

from __future__ import annotations


class EventReader:
    """Reader of events: bytes in, the data of each complete event out. Other fields are skipped."""

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []

    def feed(self, piece: bytes) -> list[bytes]:
        """Return the data of every event that ends in this piece; lines end with LF or CR LF."""
        lines = (self._rest + piece).split(b"\n")
        self._rest = lines.pop()
        return [event for line in lines if (event := self._line(line.removesuffix(b"\r"))) is not None]

    def _line(self, line: bytes) -> bytes | None:
        if line.startswith(b"data:"):
            self._data.append(line[5:].removeprefix(b" "))
            return None
        if line or not self._data:
            return None  # a comment, another field, or an empty event
        event, self._data = b"\n".join(self._data), []
        return event
