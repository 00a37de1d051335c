"""What a request's output must match, and which of its fields say so."""

from __future__ import annotations

from dataclasses import dataclass, field

from gateway.request.grammar_check import GrammarCheck
from runtime.errors import InvalidParameter
from runtime.grammar.grammar import BadGrammar, Grammar


@dataclass(frozen=True, slots=True)
class Constraint:
    """One grammar for the output. ``parts`` are tried before it: their faults have fields of their own."""

    path: str  # of the field that asked for it
    grammar: Grammar
    parts: tuple[tuple[str, Grammar], ...] = field(default=(), repr=False)

    async def verify(self, checker: GrammarCheck) -> None:
        """Raises `InvalidParameter` if workers could not compile it."""
        for path, grammar in (*self.parts, (self.path, self.grammar)):
            try:
                await checker.check(grammar)
            except BadGrammar as error:
                raise InvalidParameter(path, str(error)) from error
