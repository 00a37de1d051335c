"""Standard error for programs that must not wait for whoever reads it.

A pager, a terminal that was stopped with Ctrl-S, a log shipper that hangs: a pipe that is full holds up who
writes to it, and with an event loop everything that it serves. What does not fit is lost, and counted.
"""

from __future__ import annotations

import io
import select
from typing import TextIO

_CHARACTERS = 1024
"""At once: 4,096 bytes at most, which a pipe takes whole if it takes anything (PIPE_BUF on Linux)."""


class PatientStream(io.TextIOBase):
    """Writes to `stream` while it takes something. As `stream` for all else that a console asks of it."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._lost = 0
        self._poll: select.poll | None = None
        try:
            descriptor = stream.fileno()
        except (OSError, ValueError):
            return  # something in memory, or closed
        self._poll = select.poll()
        self._poll.register(descriptor, select.POLLOUT)

    def write(self, text: str) -> int:
        """All of it or its beginning, or nothing. Raises OSError where nobody can read it any more."""
        if self._lost and self._takes():
            lost, self._lost = self._lost, 0
            self._put(f"({lost} lines before this one were not read in time and are lost)\n")
        for begin in range(0, len(text), _CHARACTERS):
            if not self._takes():
                self._lost += 1
                break
            self._put(text[begin : begin + _CHARACTERS])
        return len(text)

    def flush(self) -> None:
        """Nothing is held back here."""

    def fileno(self) -> int:
        return self._stream.fileno()

    def isatty(self) -> bool:
        return self._stream.isatty()

    def writable(self) -> bool:
        return True

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return self._stream.encoding

    def _takes(self) -> bool:
        return self._poll is None or bool(self._poll.poll(0))

    def _put(self, text: str) -> None:
        self._stream.write(text)
        self._stream.flush()
