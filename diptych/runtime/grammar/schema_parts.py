"""Parts of a JSON schema: which keywords hold schemas, and where in one something is at fault.

A place is the path of a part, as ``properties.size.items``: names that the caller chose, and no values.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

from diptych.runtime.grammar.json_pointer import referenced_part
from diptych.runtime.grammar.patterns import has_word_boundary

MAX_PATH_CHARS: Final = 128
LOOK_AROUND: Final = re.compile(r"\(\?<?[=!]")

ONE: Final = (
    *("additionalProperties", "additionalItems", "items", "not", "if", "then", "else", "contains"),
    *("propertyNames", "unevaluatedItems", "unevaluatedProperties"),
)
"""Keywords whose value is a schema."""
NAMED: Final = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
"""Keywords whose value is an object of schemas."""
LISTS: Final = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
"""Keywords whose value is an array of schemas."""

_TYPES: Final = frozenset(["array", "boolean", "integer", "null", "number", "object", "string"])

Predicate = Callable[[Mapping[str, Any]], bool]


def place_of(schema: Mapping[str, Any], is_at_fault: Predicate) -> str:
    """Return the path of the first part of ``schema`` for which the predicate is true, in printable ASCII.

    "" for the whole schema, and for none.
    """
    found = next((path for path, part in _parts(schema, "") if is_at_fault(part)), "")
    return "".join(char if " " <= char <= "~" else "?" for char in found[:MAX_PATH_CHARS])


def has_keyword(keywords: frozenset[str]) -> Predicate:
    return lambda part: not keywords.isdisjoint(part)


def has_look_around(part: Mapping[str, Any]) -> bool:
    return any(LOOK_AROUND.search(pattern) for pattern in _patterns(part))


def has_boundary(part: Mapping[str, Any]) -> bool:
    return any(has_word_boundary(pattern) for pattern in _patterns(part))


def has_unknown_type(part: Mapping[str, Any]) -> bool:
    """Return whether ``type`` has a name that is not one of JSON Schema's."""
    types = part.get("type", ())
    names = types if isinstance(types, list) else [types]
    return any(isinstance(name, str) and name not in _TYPES for name in names)


def has_lost_reference(root: Mapping[str, Any]) -> Predicate:
    """Return a predicate: ``$ref`` points to a place that ``root`` does not have."""

    def is_lost(part: Mapping[str, Any]) -> bool:
        reference = part.get("$ref")
        return isinstance(reference, str) and referenced_part(root, reference) is None

    return is_lost


def _patterns(part: Mapping[str, Any]) -> Iterator[str]:
    if isinstance(pattern := part.get("pattern"), str):
        yield pattern
    if isinstance(named := part.get("patternProperties"), dict):
        yield from named


def _parts(part: object, path: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield each schema in ``part`` with its path, outer ones first."""
    if not isinstance(part, Mapping):
        return
    yield path, part
    for key, inner in _inner(part):
        yield from _parts(inner, f"{path}{key}" if key.startswith("[") or not path else f"{path}.{key}")


def _inner(part: Mapping[str, Any]) -> Iterator[tuple[str, object]]:
    for key in ONE:
        if isinstance(part.get(key), dict):
            yield key, part[key]
    for key in NAMED:
        if isinstance(named := part.get(key), dict):
            for name, inner in named.items():
                yield f"{key}.{name}", inner
    for key in LISTS:
        if isinstance(listed := part.get(key), list):
            for index, inner in enumerate(listed):
                yield f"{key}[{index}]", inner
