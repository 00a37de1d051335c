"""Checks of ``structured_output``, and the one grammar that it comes to.

Size and form are checked here; `Constraint.verify` compiles the grammar later, in another process.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from diptych.runtime.errors import InvalidParameter, UnsupportedFeature
from diptych.runtime.grammar.grammar import BadGrammar, Grammar, Kind
from diptych.runtime.grammar.json_schema import GUIDANCE
from diptych.runtime.grammar.patterns import literal_pattern
from diptych.runtime.strict_json import STRICT_JSON
from diptych.v1 import inference_pb2 as pb
from gateway import limits
from gateway.request.gbnf.nodes import BadGbnf
from gateway.request.gbnf.translate import translate
from gateway.request.grammar_check import GrammarCheck

ANY_OBJECT: Final = Grammar(Kind.JSON_SCHEMA, '{"type": "object"}')
# Possessive, and good without its end: looked at once, whatever is written.
_STRING: Final = re.compile(r'"(?:[^"\\]|\\.)*+"?', re.DOTALL)


@dataclass(frozen=True, slots=True)
class Constraint:
    """Grammar for the output. ``parts`` are compiled before it: their faults have fields of their own."""

    path: str  # of the field that asked for it
    grammar: Grammar
    parts: tuple[tuple[str, Grammar], ...] = field(default=(), repr=False)
    optional: bool = False  # it allows any text, and gives calls their form

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


def structured_output(asked: pb.StructuredOutput, *, lenient: bool = False) -> Constraint | None:
    """Return what the output must match. Raises InvalidParameter or UnsupportedFeature.

    ``lenient``: what an output cannot be held to is left out of a schema, and does not refuse it.
    """
    kind = asked.WhichOneof("constraint")
    if kind is None:
        return None
    path = f"structured_output.{kind}"
    if kind == "json_object":
        return Constraint(path, ANY_OBJECT) if asked.json_object else None
    if kind == "choice":
        path = f"{path}.values"
        return Constraint(path, _choice(path, asked.choice.values))
    if kind not in (_SCHEMA, *_READERS):
        raise UnsupportedFeature(path)
    text: str = getattr(asked, kind)
    check_size(path, text)
    if kind != _SCHEMA:
        return Constraint(path, _READERS[kind](path, text))
    schema = read_schema(path, text)
    return Constraint(
        path, Grammar(Kind.JSON_SCHEMA, json.dumps(lenient_schema(schema)) if lenient else text)
    )


def lenient_schema(schema: Mapping[str, object]) -> dict[str, object]:
    """Return the schema with the mark that its compiler is to leave out what it lacks."""
    return {**schema, GUIDANCE: {"lenient": True}}


def check_size(path: str, text: str) -> None:
    if not text:
        raise InvalidParameter(path, "must not be empty")
    if len(text) > limits.MAX_GRAMMAR_BYTES or len(text.encode("utf-8")) > limits.MAX_GRAMMAR_BYTES:
        raise InvalidParameter(path, f"must be at most {limits.MAX_GRAMMAR_BYTES} bytes")


def check_depth(path: str, text: str) -> None:
    if _depth(text) > limits.MAX_SCHEMA_DEPTH:
        raise InvalidParameter(path, f"must be nested at most {limits.MAX_SCHEMA_DEPTH} deep")


def read_schema(path: str, text: str) -> dict[str, object]:
    """Return the schema in ``text``: an object of bounded depth, its strings all valid Unicode.

    Raises InvalidParameter.
    """
    check_depth(path, text)
    try:
        schema = STRICT_JSON.decode(text)
        json.dumps(schema, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError as error:  # JSON may escape half of a surrogate pair
        raise InvalidParameter(path, "must be valid Unicode") from error
    except (ValueError, RecursionError) as error:  # a number of too many digits is a ValueError, too
        raise InvalidParameter(path, "must be JSON") from error
    if not isinstance(schema, dict):
        raise InvalidParameter(path, "must be a JSON object")
    return schema


def _depth(text: str) -> int:
    """Return the depth of brackets outside strings: exact up to where the text ceases to be JSON."""
    deepest = depth = 0
    for char in _STRING.sub("", text):
        if char in "{[":
            depth += 1
            deepest = max(deepest, depth)
        elif char in "}]":
            depth -= 1
    return deepest


def _regex(path: str, text: str) -> Grammar:
    return Grammar(Kind.REGEX, text)


def _ebnf(path: str, text: str) -> Grammar:
    try:
        return translate(text)
    except BadGbnf as error:
        raise InvalidParameter(path, str(error)) from error


def _choice(path: str, values: Sequence[str]) -> Grammar:
    if not values:
        raise InvalidParameter(path, "must not be empty")
    if len(values) > limits.MAX_CHOICES:
        raise InvalidParameter(path, f"must have at most {limits.MAX_CHOICES} values")
    size = 0
    for index, value in enumerate(values):
        if not value:
            raise InvalidParameter(f"{path}[{index}]", "must not be empty")
        size += len(value.encode("utf-8"))
    if size > limits.MAX_GRAMMAR_BYTES:
        raise InvalidParameter(path, f"must be at most {limits.MAX_GRAMMAR_BYTES} bytes together")
    return Grammar(Kind.REGEX, "|".join(map(literal_pattern, values)))


_SCHEMA: Final = "json_schema"
_READERS: Final[dict[str, Callable[[str, str], Grammar]]] = {"regex": _regex, "ebnf_grammar": _ebnf}
STRUCTURED_OUTPUTS: Final = (_SCHEMA, *_READERS, "choice", "json_object")
"""The constraints that `Capabilities` names."""
