"""Trial compilation of grammars in a child process that may be lost over one.

There is one child, and a hostile grammar takes half a second of it. So tenants take turns, a grammar that
several requests wait for is compiled once, and a caller may leave at any time: a grammar that the child is at
is finished all the same, any other is left out unless another request waits for it.

See `diptych.runtime.grammar.check` for why it is a process. A good grammar takes it about a millisecond.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Final

from diptych.runtime.bounded_child import frame
from diptych.runtime.errors import Draining, GrammarNotChecked, QueueFull
from diptych.runtime.grammar.grammar import BadGrammar, Grammar
from gateway.access.access import DEFAULT_TENANT
from gateway.answering_child import AnsweringChild, ChildLost, OutOfTime, read_frame

_log = logging.getLogger(__name__)


class GrammarChild(AnsweringChild):
    """Child process that compiles grammars, and its successors."""

    def __init__(self) -> None:
        super().__init__("diptych.runtime.grammar.check", "compiles grammars")

    async def ask(self, grammar: Grammar) -> str:
        """Return what is wrong with a grammar, or "".

        Only a child that its own limit has ended is evidence about the grammar. Any other may have died of
        anything, as of an operator or the kernel being short of memory.

        Raises:
            GrammarNotChecked: two children died of something else, or gave no answer in time.
        """
        question = json.dumps([grammar.kind.value, grammar.text]).encode()
        try:
            return (await self.exchange((frame(question),), read_frame)).decode()
        except OutOfTime:
            _log.warning("a grammar took more than it may to compile")
            return "is too complex"
        except ChildLost:
            raise GrammarNotChecked() from None


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
        await self.child.close()

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
