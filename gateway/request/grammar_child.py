"""Child process that compiles grammars first, and may be lost over one.

See `diptych.runtime.grammar.check` for why it is a process. It is started at the first question, answers one
at a time (a good grammar takes about a millisecond) and is replaced when it dies.

It is not started by the event loop: uvloop forks, and gRPC's fork handlers then start threads in the child,
which may crash before it becomes another program. `subprocess` uses vfork(2), which calls no handlers.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import signal
import socket
import subprocess
from dataclasses import dataclass
from typing import Final

from diptych.runtime.errors import GrammarNotChecked
from diptych.runtime.grammar.check import LENGTH
from diptych.runtime.grammar.grammar import Grammar
from diptych.runtime.python_module import module_command

_log = logging.getLogger(__name__)

ATTEMPTS: Final = 2
SILENT_SECONDS: Final = 30.0
"""A child that says nothing for so long is lost; its own limit is on processor time and much lower."""


@dataclass(frozen=True)
class _Child:
    process: subprocess.Popen[bytes]
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter


class GrammarChild:
    """Child process and its successors; takes one question at a time."""

    def __init__(self) -> None:
        self._child: _Child | None = None

    @property
    def process(self) -> subprocess.Popen[bytes] | None:
        """Process of the child that will be asked, if one was started."""
        return None if self._child is None else self._child.process

    async def ask(self, grammar: Grammar) -> str:
        """Return what is wrong with a grammar, or "".

        Only a child that its own limit has ended tells something of the grammar. Any other may have died of
        anything, as of an operator or the kernel being short of memory.

        Raises:
            GrammarNotChecked: two children died of something else, or one after the other said nothing.
        """
        question = json.dumps([grammar.kind.value, grammar.text]).encode()
        for _ in range(ATTEMPTS):
            if self.process is not None and self.process.poll() is not None:
                await self.end()  # it died of something else than a question
            try:
                return await self._answer(question)
            except (asyncio.IncompleteReadError, OSError):  # TimeoutError is one
                if await self.end() == -signal.SIGPROF:
                    _log.warning("a grammar took more than it may to compile")
                    return "is too complex"
                _log.warning("the process that compiles grammars was lost")
            except asyncio.CancelledError:
                await self.end()  # its answer would be taken for that to the next question
                raise
        raise GrammarNotChecked()

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

    async def _answer(self, question: bytes) -> str:
        child = self._child or await self._start()
        async with asyncio.timeout(SILENT_SECONDS):
            child.writer.write(LENGTH.pack(len(question)) + question)
            await child.writer.drain()
            (size,) = LENGTH.unpack(await child.reader.readexactly(LENGTH.size))
            return (await child.reader.readexactly(size)).decode()

    async def _start(self) -> _Child:
        process, ours = _spawn()
        self._child = _Child(process, *(await asyncio.open_connection(sock=ours)))
        return self._child


def _spawn() -> tuple[subprocess.Popen[bytes], socket.socket]:
    """Start the child, which blocks this thread for about a millisecond, and return our end as well."""
    ours, theirs = socket.socketpair()
    with theirs:
        process = subprocess.Popen(
            module_command("diptych.runtime.grammar.check"),
            stdin=theirs.fileno(),
            stdout=theirs.fileno(),
            stderr=subprocess.DEVNULL,  # a panic would quote the grammar
        )
    return process, ours
