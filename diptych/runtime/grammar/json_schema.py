"""JSON schemas as llguidance takes them: what it lacks is written in what it has, where that says the same.

- A ``format`` that it does not know is dropped: by the standard it is an annotation.
- ``propertyNames`` becomes ``patternProperties`` where no properties are declared.
- ``uniqueItems`` of few values becomes all lists of them.
- Look-ahead at the beginning of a pattern becomes patterns that all must match.
- Patterns have ASCII classes (`diptych.runtime.grammar.patterns`).

Anything else stays, and the compiler refuses it. With ``x-guidance`` of ``{"lenient": true}`` the compiler
leaves keywords out that it lacks, and so are patterns that it cannot have.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping
from typing import Any, Final

from diptych.runtime.grammar.json_pointer import referenced_part
from diptych.runtime.grammar.patterns import (
    ascii_classes,
    has_word_boundary,
    literal_pattern,
    split_look_ahead,
)
from diptych.runtime.grammar.schema_parts import LISTS, LOOK_AROUND, NAMED, ONE

GUIDANCE: Final = "x-guidance"
FORMATS: Final = frozenset(
    ["date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri", "unknown"]
)
"""The values of ``format`` that llguidance 1.9 holds an output to."""
MAX_LISTS: Final = 400  # that all of `uniqueItems` becomes: of five values 326
MAX_VALUES_CHARS: Final = 256  # of the values in one of them

Schema = dict[str, Any]


def is_lenient(schema: Mapping[str, object]) -> bool:
    """Return whether the schema asks for what cannot be held to be left out."""
    guidance = schema.get(GUIDANCE)
    return isinstance(guidance, dict) and guidance.get("lenient") is True


def prepare_schema(schema: Mapping[str, Any]) -> Schema:
    """Return a schema of the same meaning that llguidance compiles, where there is one."""
    prepared: Schema = _Preparer(schema, lenient=is_lenient(schema)).prepare(dict(schema))
    return prepared


class _Preparer:
    def __init__(self, root: Mapping[str, Any], *, lenient: bool) -> None:
        self._root = root
        self._lenient = lenient
        self._lists = MAX_LISTS  # that may still be made

    def prepare(self, part: Any) -> Any:
        """Return a part of the schema, prepared; what is no schema as it is."""
        if not isinstance(part, dict):
            return part
        part = dict(part)
        if isinstance(part.get("format"), str) and part["format"] not in FORMATS:
            del part["format"]
        if part.get("uniqueItems") is False:
            del part["uniqueItems"]
        self._prepare_pattern(part)
        self._prepare_names(part)
        self._prepare_unique(part)
        for key in ONE:
            if key in part:
                part[key] = self.prepare(part[key])
        for key in NAMED:
            if isinstance(named := part.get(key), dict):
                part[key] = {name: self.prepare(inner) for name, inner in named.items()}
        for key in LISTS:
            if isinstance(listed := part.get(key), list):
                part[key] = [self.prepare(inner) for inner in listed]
        return part

    def _prepare_pattern(self, part: Schema) -> None:
        if isinstance(pattern := part.get("pattern"), str):
            first, *more = split_look_ahead(pattern) or [pattern]
            if any(map(self._drops, (first, *more))):
                del part["pattern"]
            elif more and not isinstance(part.get("allOf", []), list):
                return
            else:
                part["pattern"] = ascii_classes(first, ecma=True)
                if more:
                    part["allOf"] = [*part.get("allOf", []), *({"pattern": one} for one in more)]
        if isinstance(named := part.get("patternProperties"), dict):
            part["patternProperties"] = {
                ascii_classes(pattern, ecma=True): inner
                for pattern, inner in named.items()
                if not self._drops(pattern)
            }

    def _drops(self, pattern: str) -> bool:
        return self._lenient and bool(LOOK_AROUND.search(pattern) or has_word_boundary(pattern))

    def _prepare_names(self, part: Schema) -> None:
        """Write ``propertyNames`` as ``patternProperties``, if it comes to one pattern and none are there."""
        if "propertyNames" not in part:
            return
        names = self._resolved(part["propertyNames"])
        pattern = "" if names is True else _name_pattern(names)
        if pattern is None or (pattern and (part.get("patternProperties") or part.get("properties"))):
            return
        if pattern:
            others = part.get("additionalProperties", True)
            if others is not False:
                part["patternProperties"] = {ascii_classes(pattern, ecma=True): others}
                part["additionalProperties"] = False
        del part["propertyNames"]

    def _prepare_unique(self, part: Schema) -> None:
        """Write ``uniqueItems`` as the lists that there are, if the items are of few values."""
        if (
            part.get("uniqueItems") is not True
            or "prefixItems" in part
            or part.get("type", "array") != "array"
        ):
            return
        most, least = part.get("maxItems"), part.get("minItems", 0)
        if most in (0, 1):
            del part["uniqueItems"]
            return
        items = self._resolved(part.get("items"))
        values = _values(items)
        if (
            values is None
            or not isinstance(least, int)
            or not isinstance(most, int | None)
            or "anyOf" in part
        ):
            return
        most = len(values) if most is None else min(most, len(values))
        lengths = range(max(least, 0), most + 1)
        made = (_list_of(picked) for length in lengths for picked in itertools.permutations(values, length))
        lists = list(itertools.islice(made, self._lists + 1))
        if not 0 < len(lists) <= self._lists:
            return
        self._lists -= len(lists)
        for key in ("uniqueItems", "items", "minItems", "maxItems", "type"):
            part.pop(key, None)
        part["anyOf"] = lists

    def _resolved(self, part: object) -> object:
        """Return the definition that a schema of a single reference stands for, or the schema."""
        for _ in range(8):
            if not isinstance(part, dict) or "$ref" not in part:
                break
            part = referenced_part(self._root, part["$ref"])
        return part


def _list_of(values: tuple[object, ...]) -> Schema:
    if not values:
        return {"type": "array", "maxItems": 0}
    constants = [{"const": value} for value in values]
    return {"type": "array", "prefixItems": constants, "items": False, "minItems": len(values)}


_LABELS: Final = frozenset(["title", "description", "default", "examples", "$comment", "deprecated"])


def _values(part: object) -> list[object] | None:
    """Return the values that a schema of ``enum``, ``const`` or truth values allows, each once."""
    if not isinstance(part, dict):
        return None
    known = {key: value for key, value in part.items() if key not in (*_LABELS, "type")}
    if not known and part.get("type") == "boolean":
        return [False, True]
    if known.keys() == {"const"}:
        return [known["const"]]
    if known.keys() != {"enum"} or not isinstance(known["enum"], list):
        return None
    distinct = {json.dumps(value, sort_keys=True): value for value in known["enum"]}
    return list(distinct.values()) if sum(map(len, distinct)) <= MAX_VALUES_CHARS else None


def _name_pattern(names: object) -> str | None:
    """Return the pattern of the names that match a schema: "" for any, None where there is no pattern."""
    if not isinstance(names, dict) or names.get("type", "string") != "string":
        return None
    known = {key: value for key, value in names.items() if key not in (*_LABELS, "type")}
    if isinstance(known.get("format"), str) and known["format"] not in FORMATS:
        del known["format"]
    if not known:
        return ""
    if known.keys() <= {"enum", "const"}:
        values = known.get("enum", [known.get("const")])
        texts = [value for value in values if isinstance(value, str)] if isinstance(values, list) else []
        return f"^(?:{'|'.join(map(literal_pattern, texts))})$" if texts else None
    if known.keys() == {"pattern"} and isinstance(pattern := known["pattern"], str):
        return None if LOOK_AROUND.search(pattern) or has_word_boundary(pattern) else pattern
    least, most = known.get("minLength", 0), known.get("maxLength", "")
    if known.keys() <= {"minLength", "maxLength"} and isinstance(least, int) and isinstance(most, int | str):
        return f"^(?s:.){{{least},{most}}}$"
    return None
