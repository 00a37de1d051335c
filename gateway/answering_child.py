"""A child process that answers one question at a time, and its successors: any may be lost over a question.

It is started at the first question and replaced when it dies. It is not started by the event loop: uvloop
forks, and gRPC's fork handlers then start threads in the child, which may crash before it becomes another
program. `subprocess` uses vfork(2), which calls no handlers.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import subprocess
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Final, TypeVar

from diptych.runtime.bounded_child import LENGTH
from diptych.runtime.python_module import module_command

_log = logging.getLogger(__name__)

ATTEMPTS: Final = 2
SILENT_SECONDS: Final = 30.0
"""A child without an answer for so long is lost; its own limit is on processor time and lower."""

Answer = TypeVar("Answer")


class OutOfTime(Exception):
    """A question that took the child's own limit of processor time."""


class ChildLost(Exception):
    """A question over which as many children as are tried died of something else, or gave no answer."""


@dataclass(frozen=True)
class _Child:
    process: subprocess.Popen[bytes]
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter


class AnsweringChild:
    """Child process and its successors; takes one question at a time."""

    def __init__(self, module: str, task: str) -> None:
        """Run `module`, whose side of it is `diptych.runtime.bounded_child`; `task` says in the log what it
        does, as "decodes images".
        """
        self._module = module
        self._task = task
        self._child: _Child | None = None
        self._closed = False

    @property
    def process(self) -> subprocess.Popen[bytes] | None:
        """Process of the child that will be asked, if one was started."""
        return None if self._child is None else self._child.process

    async def exchange(
        self, question: Sequence[bytes], read: Callable[[asyncio.StreamReader], Awaitable[Answer]]
    ) -> Answer:
        """Write the parts of a question and return what `read` makes of the answer.

        A child may die of anything: only one that its own limit has ended is evidence about the question.

        Raises OutOfTime, ChildLost, and what `read` raises.
        """
        for _ in range(ATTEMPTS):
            if self.process is not None and self.process.poll() is not None:
                await self.end()  # it died of something else than a question
            try:
                child = self._child or await self._start()
                async with asyncio.timeout(SILENT_SECONDS):
                    for part in question:
                        child.writer.write(part)
                    await child.writer.drain()
                    return await read(child.reader)
            except (asyncio.IncompleteReadError, OSError):  # TimeoutError is one
                if await self.end() == -signal.SIGPROF:
                    raise OutOfTime() from None
                if self._closed:
                    break
                _log.warning("the process that %s was lost", self._task)
            except asyncio.CancelledError:
                await self.end()  # its answer would be taken for that to the next question
                raise
        raise ChildLost()

    async def close(self) -> None:
        """End the child for good: a question that it is at gets no successor."""
        self._closed = True
        await self.end()

    async def end(self) -> int | None:
        """End the child, if there is one. Returns its return code."""
        child, self._child = self._child, None
        if child is None:
            return None
        child.process.kill()
        child.writer.close()
        with contextlib.suppress(ConnectionError):
            await child.writer.wait_closed()
        return await asyncio.to_thread(child.process.wait)

    async def _start(self) -> _Child:
        process, ours = _spawn(self._module)
        self._child = child = _Child(process, *(await asyncio.open_connection(sock=ours)))
        if self._closed:  # meanwhile
            await self.end()
            raise ChildLost()
        return child


async def read_frame(reader: asyncio.StreamReader) -> bytes:
    """Return the data of the next frame. Raises IncompleteReadError at the end."""
    (size,) = LENGTH.unpack(await reader.readexactly(LENGTH.size))
    return await reader.readexactly(size)


def _spawn(module: str) -> tuple[subprocess.Popen[bytes], socket.socket]:
    """Start the child, which blocks this thread for about a millisecond, and return our end as well."""
    ours, theirs = socket.socketpair()
    with theirs:
        process = subprocess.Popen(
            module_command(module),
            stdin=theirs.fileno(),
            stdout=theirs.fileno(),
            stderr=subprocess.DEVNULL,  # a panic would quote what a caller sent
        )
    return process, ours
