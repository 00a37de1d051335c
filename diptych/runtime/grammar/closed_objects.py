"""JSON schemas whose objects are closed where they do not say that they are open.

An object with ``properties`` and no ``additionalProperties`` may hold any further member by the standard
(JSON Schema 2020-12, Core, 10.3.2.3). A model that is held to such a schema may go on to invent members until
its tokens run out. Here the members that are named are all there are; ``additionalProperties: true`` keeps an
object open.

Schemas that hold for the same value (``allOf``, ``$ref`` beside other keywords, ``anyOf`` beside
``properties``) are closed together: each of them allows the members that the others name.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from diptych.runtime.grammar.json_pointer import referenced_part

_MAX_COPIES: Final = 200
"""Copies of referenced schemas; beyond, a reference is left as it is."""
_MAX_CHAIN: Final = 32
"""Copies inside one another, likewise."""
_SAYS_ITSELF: Final = ("additionalProperties", "unevaluatedProperties")
_MAPS: Final = ("properties", "patternProperties", "$defs", "definitions")
_VALUES: Final = ("items", "additionalProperties", "additionalItems", "unevaluatedItems", "contains")
_LISTS: Final = ("prefixItems", "items")
_EITHER: Final = ("anyOf", "oneOf")

Schema = Mapping[str, Any]


def close_objects(schema: Schema) -> dict[str, Any]:
    """Return `schema` with closed objects. Raises RecursionError for one nested beyond the stack."""
    return _Closing(schema).close(schema)


class _Closing:
    """Closing of one schema, `root`, which references are resolved in."""

    def __init__(self, root: Schema) -> None:
        self._root = root
        self._copies = 0

    def close(
        self, schema: Schema, beside: frozenset[str] = frozenset(), *, is_open: bool = False, via: str = ""
    ) -> dict[str, Any]:
        """Return `schema` closed.

        Args:
            schema: any.
            beside: members that other schemas name for the same value.
            is_open: another schema for the same value says itself what else an object may hold.
            via: references that led here, one a line.
        """
        made = {name: self._inner(name, value, via) for name, value in schema.items()}
        target_aside = {name: value for name, value in schema.items() if name != "$ref"}
        open_beside_target = is_open or any(self._says_itself(target_aside, frozenset()))
        is_open = open_beside_target or any(self._says_itself(schema, frozenset()))
        named = beside | self._common(schema)
        for branch in _EITHER:
            if isinstance(schema.get(branch), list):
                made[branch] = [self._branch(one, named, is_open, via) for one in schema[branch]]
        if isinstance(schema.get("allOf"), list):
            every = named | self._names(schema, frozenset())
            made["allOf"] = [self._branch(one, every, is_open, via) for one in schema["allOf"]]
        self._inline(made, schema, named, is_open=open_beside_target, via=via)
        if isinstance(schema.get("properties"), dict) and not is_open:
            every = named | self._names(schema, frozenset())
            made["properties"] |= {name: {} for name in sorted(every - made["properties"].keys())}
            made["additionalProperties"] = False
        return made

    def _branch(self, schema: Any, beside: frozenset[str], is_open: bool, via: str) -> Any:
        return self.close(schema, beside, is_open=is_open, via=via) if isinstance(schema, dict) else schema

    def _inner(self, name: str, value: Any, via: str) -> Any:
        """Close the schemas for other values that a keyword holds."""
        if name in _MAPS and isinstance(value, dict):
            return {key: self._value(one, via) for key, one in value.items()}
        if name in _LISTS and isinstance(value, list):
            return [self._value(one, via) for one in value]
        return self._value(value, via) if name in _VALUES else value

    def _value(self, schema: Any, via: str) -> Any:
        return self.close(schema, via=via) if isinstance(schema, dict) else schema

    def _inline(
        self, made: dict[str, Any], schema: Schema, named: frozenset[str], *, is_open: bool, via: str
    ) -> None:
        """Replace a reference by a copy where its target is not alone in naming members."""
        reference = schema.get("$ref")
        target = self._target(reference)
        if target is None:
            return
        others = named - self._names(target, frozenset({str(reference)}))
        chain = via.splitlines()
        known = str(reference) in chain or len(chain) > _MAX_CHAIN
        if not (others or is_open) or known or self._copies >= _MAX_COPIES:
            return
        self._copies += 1
        del made["$ref"]
        copy = self.close(target, named, is_open=is_open, via=f"{via}\n{reference}")
        made["allOf"] = [*made.get("allOf", ()), copy]

    def _common(self, schema: Schema) -> frozenset[str]:
        """Return the members that a schema names whichever of its alternatives holds."""
        without = {name: value for name, value in schema.items() if name not in _EITHER}
        return self._names(without, frozenset())

    def _names(self, schema: Any, seen: frozenset[str]) -> frozenset[str]:
        """Return the members that a schema and its parts for the same value name or require."""
        return frozenset(name for part in self._parts(schema, seen) for name in _own_names(part))

    def _says_itself(self, schema: Schema, seen: frozenset[str]) -> Iterator[bool]:
        """Yield for a schema and what always holds with it whether it says what else an object may hold."""
        without = {name: value for name, value in schema.items() if name not in _EITHER}
        for part in self._parts(without, seen):
            yield any(name in part for name in _SAYS_ITSELF)

    def _parts(self, schema: Any, seen: frozenset[str]) -> Iterator[Schema]:
        """Yield a schema and all that may hold for the same value, each reference once."""
        left, visited = [schema], set(seen)
        while left:
            part = left.pop()
            if not isinstance(part, dict):
                continue
            yield part
            for branch in (*_EITHER, "allOf"):
                if isinstance(part.get(branch), list):
                    left += part[branch]
            reference = part.get("$ref")
            if isinstance(reference, str) and reference not in visited:
                visited.add(reference)
                left.append(self._target(reference))

    def _target(self, reference: object) -> Schema | None:
        """Return the schema that a reference points to, or None."""
        found = referenced_part(self._root, reference)
        return found if isinstance(found, dict) else None


def _own_names(schema: Schema) -> Iterator[str]:
    properties, required = schema.get("properties"), schema.get("required")
    if isinstance(properties, dict):
        yield from properties
    if isinstance(required, list):
        yield from (name for name in required if isinstance(name, str))
