"""What a request's output must match, and which of its fields say so."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from gateway.request.grammar_check import GrammarCheck
from gateway.session.states import State
from runtime.errors import DeadlineExceeded, InvalidParameter
from runtime.grammar.grammar import BadGrammar, Grammar


@dataclass(frozen=True, slots=True)
class Constraint:
    """One grammar for the output. ``parts`` are tried before it: their faults have fields of their own."""

    path: str  # of the field that asked for it
    grammar: Grammar
    parts: tuple[tuple[str, Grammar], ...] = field(default=(), repr=False)

    async def verify(self, checker: GrammarCheck, tenant: str, time_left_s: float | None) -> None:
        """Return if workers could compile it.

        Raises:
            InvalidParameter: they could not.
            DeadlineExceeded: it was not its turn in time.
            QueueFull, GrammarNotChecked: as `GrammarCheck.check`.
        """
        try:
            async with asyncio.timeout(time_left_s):
                await self._verify_all(checker, tenant)
        except TimeoutError:
            raise DeadlineExceeded(State.QUEUED.value) from None

    async def _verify_all(self, checker: GrammarCheck, tenant: str) -> None:
        """Asked at once, so that they wait for one turn together; the first fault leaves out the rest."""
        all_parts = (*self.parts, (self.path, self.grammar))
        asked = [asyncio.create_task(_verify(*part, checker, tenant)) for part in all_parts]
        try:
            for task in asked:
                await task
        finally:
            for task in asked:
                task.cancel()
            await asyncio.gather(*asked, return_exceptions=True)


async def _verify(path: str, grammar: Grammar, checker: GrammarCheck, tenant: str) -> None:
    try:
        await checker.check(grammar, tenant)
    except BadGrammar as error:
        raise InvalidParameter(path, str(error)) from error
