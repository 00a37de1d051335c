"""Standard error for programs that must not wait for its reader.

A pager, a terminal that was stopped or hangs, a log shipper that is stuck: when its pipe is full, who writes
to it sleeps, and with an event loop everything that it serves. Here what does not fit is lost, and counted.
So is what a file has no room for, whose disk is full now and not for ever.
"""

from __future__ import annotations

import errno
import io
import os
import select
import stat
from typing import TextIO

_PIECE = 4096
"""Bytes that a socket which takes anything takes as a rule."""
_DISK_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})


class NonblockingStream(io.TextIOBase):
    """Writes to `stream` what it takes at once; nothing anywhere, where that is None: a program without
    standard error. As `stream` for all else that a console asks of it. One thread at a time writes.
    """

    def __init__(self, stream: TextIO | None) -> None:
        self._stream = stream
        self._lost = 0  # writes, or the ends of some
        self._cut = False  # the last line that went out has no end
        self._own: int | None = None
        self._file: int | None = None  # where it is one: not through a buffer that keeps what had no room
        self._poll: select.poll | None = None
        try:
            descriptor = -1 if stream is None else stream.fileno()
        except (OSError, ValueError):
            return  # something in memory, or closed
        if descriptor >= 0 and stat.S_ISREG(os.fstat(descriptor).st_mode):
            self._file = descriptor
        elif descriptor >= 0:
            self._own = _unblocking(descriptor)
            if self._own is None:
                self._poll = select.poll()
                self._poll.register(descriptor, select.POLLOUT)

    def write(self, text: str) -> int:
        """Write all of `text`, its beginning, or nothing. Raises OSError where it has no reader any more."""
        if self._stream is None:
            return len(text)
        notice = self._notice().encode(self.encoding, "backslashreplace")
        data = notice + text.encode(self.encoding, "backslashreplace")
        taken = self._take(data)
        if taken >= len(notice):
            self._lost = 0  # of these it has been said
        self._lost += taken < len(data)
        if taken:
            self._cut = not data[:taken].endswith(b"\n")
        return len(text)

    def flush(self) -> None:
        """Do nothing: no text is held back."""

    def fileno(self) -> int:
        if self._stream is None:
            raise OSError("there is no standard error")
        return self._stream.fileno()

    def isatty(self) -> bool:
        return self._stream is not None and self._stream.isatty()

    def writable(self) -> bool:
        return True

    def close(self) -> None:
        if self._own is not None:
            os.close(self._own)
            self._own = None
        super().close()

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return (self._stream and self._stream.encoding) or "utf-8"

    def _notice(self) -> str:
        if not self._lost:
            return ""
        begin = "\n" if self._cut else ""
        return f"{begin}({self._lost} writes had no room in time, and are lost)\n"

    def _take(self, data: bytes) -> int:
        """Return how many of the bytes went out."""
        taken = 0
        unbuffered = self._own if self._file is None else self._file
        if unbuffered is None:
            while taken < len(data) and (self._poll is None or self._poll.poll(0)):
                end = len(data) if self._poll is None else taken + _PIECE
                self._put(data[taken:end])
                taken = min(end, len(data))
            return taken
        try:
            while taken < len(data):
                taken += os.write(unbuffered, data[taken:])
        except BlockingIOError:
            pass  # full
        except OSError as error:
            if error.errno not in _DISK_FULL:
                raise
        return taken

    def _put(self, data: bytes) -> None:
        assert self._stream is not None
        self._stream.write(data.decode(self.encoding, "replace"))
        self._stream.flush()


def _unblocking(descriptor: int) -> int | None:
    """Open the same pipe or terminal once more, so that a write never waits: the flag is not for a descriptor
    but for all that share its opening, and so for other programs. None where there is no such way (sockets).
    """
    try:
        return os.open(f"/proc/self/fd/{descriptor}", os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY)
    except OSError:
        return None
