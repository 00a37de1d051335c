"""Whether a grammar can be compiled, asked of a child process that may be lost over it.

See `runtime.grammar.check` for why it is a process. It is started at the first question, answers one at a
time (a good grammar takes about a millisecond) and is replaced when it dies.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import sys
from collections import OrderedDict
from typing import Final

from runtime.grammar.check import LENGTH
from runtime.grammar.grammar import BadGrammar, Grammar

_log = logging.getLogger(__name__)

REMEMBERED: Final = 1024
"""Answers that are kept, by the digest of the grammar."""
START_SECONDS: Final = 30.0
"""A child that says nothing for so long is lost; its own limit is on processor time and much lower."""


class GrammarCheck:
    """One per gateway."""

    def __init__(self) -> None:
        self._child: asyncio.subprocess.Process | None = None
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
        child = self._child or await self._start()
        if child.stdin is None or child.stdout is None:
            raise RuntimeError("the child was started without pipes")
        question = json.dumps([grammar.kind.value, grammar.text]).encode()
        try:
            async with asyncio.timeout(START_SECONDS):
                child.stdin.write(LENGTH.pack(len(question)) + question)
                await child.stdin.drain()
                (size,) = LENGTH.unpack(await child.stdout.readexactly(LENGTH.size))
                return (await child.stdout.readexactly(size)).decode()
        except (asyncio.IncompleteReadError, ConnectionError, TimeoutError):
            await self._end()
            _log.warning("a grammar took more than it may to compile")
            return "is too complex"
        except asyncio.CancelledError:
            await self._end()  # its answer would be taken for that to the next question
            raise

    async def _start(self) -> asyncio.subprocess.Process:
        self._child = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "runtime.grammar.check"),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,  # a panic would quote the grammar
        )
        return self._child

    async def _end(self) -> None:
        child, self._child = self._child, None
        if child is not None:
            with contextlib.suppress(ProcessLookupError):
                child.kill()
            await child.wait()
