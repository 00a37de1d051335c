"""What a request's output must match, and which of its fields say so."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from diptych.runtime.errors import InvalidParameter
from diptych.runtime.grammar.grammar import BadGrammar, Grammar
from gateway.request.grammar_check import GrammarCheck


@dataclass(frozen=True, slots=True)
class Constraint:
    """One grammar for the output. ``parts`` are tried before it: their faults have fields of their own."""

    path: str  # of the field that asked for it
    grammar: Grammar
    parts: tuple[tuple[str, Grammar], ...] = field(default=(), repr=False)

    async def verify(self, checker: GrammarCheck, tenant: str) -> None:
        """Return if workers could compile it.

        All is asked at once, so that it waits for one turn together; the first fault leaves out the rest.

        Raises:
            InvalidParameter: they could not.
            QueueFull, Draining, GrammarNotChecked: as `GrammarCheck.check`.
        """
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
