"""Whether a grammar can be compiled, asked of a child process that may be lost over it.

See `runtime.grammar.check` for why it is a process. It is started at the first question, answers one at a
time (a good grammar takes about a millisecond) and is replaced when it dies.

It is not started by the event loop: uvloop forks, and gRPC's fork handlers then start threads in the child,
which may crash before it becomes another program. `subprocess` uses vfork(2), which calls no handlers.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import socket
import subprocess
import sys
from collections import OrderedDict
from dataclasses import dataclass
from typing import Final

from runtime.grammar.check import LENGTH
from runtime.grammar.grammar import BadGrammar, Grammar

_log = logging.getLogger(__name__)

REMEMBERED: Final = 1024
"""Answers that are kept, by the digest of the grammar."""
START_SECONDS: Final = 30.0
"""A child that says nothing for so long is lost; its own limit is on processor time and much lower."""


@dataclass(frozen=True)
class _Child:
    process: subprocess.Popen[bytes]
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter


class GrammarCheck:
    """One per gateway."""

    def __init__(self) -> None:
        self._child: _Child | None = None
        self._turn = asyncio.Lock()
        self._answers: OrderedDict[bytes, str] = OrderedDict()

    async def check(self, grammar: Grammar) -> None:
        """Raises `BadGrammar` if workers could not compile `grammar`."""
        digest = grammar.digest
        fault = self._answers.get(digest)
        if fault is None:
            async with self._turn:
                fault = await self._ask(grammar)
            self._answers[digest] = fault
            if len(self._answers) > REMEMBERED:
                self._answers.popitem(last=False)
        if fault:
            raise BadGrammar(fault)

    async def close(self) -> None:
        """End the child."""
        async with self._turn:
            await self._end()

    async def _ask(self, grammar: Grammar) -> str:
        """What is wrong with it, or nothing. A caller that leaves meanwhile takes the child with it."""
        if self._child is not None and self._child.process.poll() is not None:
            await self._end()  # it died of something else than a question
        child = self._child or await self._start()
        question = json.dumps([grammar.kind.value, grammar.text]).encode()
        try:
            async with asyncio.timeout(START_SECONDS):
                child.writer.write(LENGTH.pack(len(question)) + question)
                await child.writer.drain()
                (size,) = LENGTH.unpack(await child.reader.readexactly(LENGTH.size))
                return (await child.reader.readexactly(size)).decode()
        except (asyncio.IncompleteReadError, ConnectionError, TimeoutError):
            await self._end()
            _log.warning("a grammar took more than it may to compile")
            return "is too complex"
        except asyncio.CancelledError:
            await self._end()  # its answer would be taken for that to the next question
            raise

    async def _start(self) -> _Child:
        process, ours = _spawn()
        self._child = _Child(process, *(await asyncio.open_connection(sock=ours)))
        return self._child

    async def _end(self) -> None:
        child, self._child = self._child, None
        if child is None:
            return
        child.process.kill()
        child.writer.close()
        with contextlib.suppress(ConnectionError):
            await child.writer.wait_closed()
        await asyncio.to_thread(child.process.wait)


def _spawn() -> tuple[subprocess.Popen[bytes], socket.socket]:
    """The child, which blocks this thread for about a millisecond, and our end of its input and output."""
    ours, theirs = socket.socketpair()
    with theirs:
        process = subprocess.Popen(
            (sys.executable, "-m", "runtime.grammar.check"),
            stdin=theirs.fileno(),
            stdout=theirs.fileno(),
            stderr=subprocess.DEVNULL,  # a panic would quote the grammar
        )
    return process, ours
