"""Trial compilation of grammars in a child process that may be lost over one.

There is one child, and a hostile grammar takes half a second of it. So tenants take turns, a grammar that
several requests wait for is compiled once, and a caller may leave at any time: a grammar that the child is at
is finished all the same, any other is left out unless another request waits for it.

See `diptych.runtime.grammar.check` for why it is a process. It is started at the first question, answers one
at a time (a good grammar takes about a millisecond) and is replaced when it dies. It is not started by the
event loop: uvloop forks, and gRPC's fork handlers then start threads in the child, which may crash before it
becomes another program. `subprocess` uses vfork(2), which calls no handlers.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import signal
import socket
import subprocess
import time
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Final

from diptych.runtime.errors import Draining, GrammarNotChecked, QueueFull
from diptych.runtime.grammar.check import LENGTH
from diptych.runtime.grammar.grammar import BadGrammar, Grammar
from diptych.runtime.python_module import module_command
from gateway.access.access import DEFAULT_TENANT

_log = logging.getLogger(__name__)

ATTEMPTS: Final = 2
SILENT_SECONDS: Final = 30.0
"""A child without an answer for so long is lost; its own limit is on processor time and much lower."""


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

        Only a child that its own limit has ended is evidence about the grammar. Any other may have died of
        anything, as of an operator or the kernel being short of memory.

        Raises:
            GrammarNotChecked: two children died of something else, or gave no answer in time.
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


REMEMBERED: Final = 1024
"""Answers that are kept, by the digest of the grammar."""
MAX_WAITING: Final = 256
"""Grammars of one tenant that wait for the child. A request has as many as it has tools, and one more."""
TURN_S: Final = 0.5
"""Time after its first answer in which a turn goes on to the tenant's next grammar."""


@dataclass(eq=False)
class _Question:
    grammar: Grammar
    answer: asyncio.Future[str]
    callers: int = 0


@dataclass(eq=False)
class _Line:
    """Queue of one tenant by digest, the first one first. It has a task as long as it is not empty."""

    questions: dict[bytes, _Question] = field(default_factory=dict)
    task: asyncio.Task[None] | None = None


class GrammarCheck:
    """Queues of grammars for the child, one a tenant; one object per gateway."""

    def __init__(self) -> None:
        self.child = GrammarChild()
        self._turn = asyncio.Lock()  # of the tenants' queues: one that comes back to it waits for all others
        self._lines: dict[str, _Line] = {}
        self._answers: OrderedDict[bytes, str] = OrderedDict()
        self._closed = False

    async def check(self, grammar: Grammar, tenant: str = DEFAULT_TENANT) -> None:
        """Return if workers can compile it.

        Raises:
            BadGrammar: they cannot.
            QueueFull: too many other ones of this tenant wait.
            Draining: this is the end.
            GrammarNotChecked: see `GrammarChild`.
        """
        digest = grammar.digest
        fault = self._answers.get(digest)
        if fault is None:
            fault = await self._wait(digest, grammar, tenant)
        if fault:
            raise BadGrammar(fault)

    async def close(self) -> None:
        """End the child; requests that still wait get Draining."""
        lines, self._lines, self._closed = list(self._lines.values()), {}, True
        tasks = [line.task for line in lines if line.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for question in (question for line in lines for question in line.questions.values()):
            question.answer.set_exception(Draining())
            question.answer.exception()  # not reported where all callers have left
        await self.child.end()

    async def _wait(self, digest: bytes, grammar: Grammar, tenant: str) -> str:
        if self._closed:
            raise Draining()
        line = self._lines.setdefault(tenant, _Line())
        question = line.questions.get(digest)
        if question is None:
            if len(line.questions) >= MAX_WAITING:
                raise QueueFull()
            question = _Question(grammar, asyncio.get_running_loop().create_future())
            line.questions[digest] = question
            line.task = line.task or asyncio.create_task(self._serve(tenant, line))
        question.callers += 1
        try:
            return await asyncio.shield(question.answer)
        finally:
            question.callers -= 1

    async def _serve(self, tenant: str, line: _Line) -> None:
        """Answer a tenant's questions until it has none. One that the child is lost over ends the turn."""
        while line.questions:
            async with self._turn:
                end: float | None = None
                while line.questions and (end is None or (self.child.process and time.monotonic() < end)):
                    digest, question = next(iter(line.questions.items()))
                    try:
                        question.answer.set_result(await self._answer(digest, question))
                    except Exception as error:
                        question.answer.set_exception(error)
                        question.answer.exception()  # not reported where all callers have left
                    del line.questions[digest]
                    end = end or time.monotonic() + TURN_S
        del self._lines[tenant]

    async def _answer(self, digest: bytes, question: _Question) -> str:
        known = self._answers.get(digest)  # since another tenant's turn
        if known is not None or not question.callers:
            return known or ""
        fault = self._answers[digest] = await self.child.ask(question.grammar)
        if len(self._answers) > REMEMBERED:
            self._answers.popitem(last=False)
        return fault
