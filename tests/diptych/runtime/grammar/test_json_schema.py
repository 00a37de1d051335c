"""Everyday JSON schemas and patterns, against the library that outputs are held to."""

from __future__ import annotations

import json
from typing import Any

import pytest
from llguidance import LLTokenizer

from diptych.runtime.grammar.grammar import BadGrammar, Grammar, Kind
from diptych.runtime.grammar.matcher import new_matcher

BYTES = LLTokenizer("byte")
WEEKDAYS = {"$defs": {"Day": {"enum": ["Mo", "Tu", "We"], "title": "Day", "type": "string"}}}


def accepts(kind: Kind, grammar: str, text: str) -> bool:
    matcher = new_matcher(Grammar(kind, grammar), BYTES)
    data = list(text.encode())
    return matcher.try_consume_tokens(data) == len(data) and matcher.is_accepting()


def holds(schema: Any, value: object) -> bool:
    return accepts(Kind.JSON_SCHEMA, json.dumps(schema), json.dumps(value, ensure_ascii=False))


def refusal(kind: Kind, grammar: Any) -> str:
    with pytest.raises(BadGrammar) as refused:
        new_matcher(Grammar(kind, grammar if isinstance(grammar, str) else json.dumps(grammar)), BYTES)
    return str(refused.value)


@pytest.mark.parametrize(
    ("pattern", "inside", "outside"),
    [
        (r"\d{3}-\d{4}", ["555-0199"], ["٣٣٣-٣٣٣٣", "\U0001fbf8\U0001fbf8\U0001fbf8-0000"]),
        (r"\w+", ["a_1"], ["é"]),
        (r"a\sb", ["a b", "a\tb"], ["a\u00a0b"]),
        (r"\D\W\S", ["a-b", "٣é٣"], ["1-b", "aab", "a- "]),
        (r"[\d_]+", ["1_2"], ["٣"]),
        (r"[^\d]", ["a", "٣"], ["1"]),
        (r"[\w.-]+@[^\s@]+", ["a.b-c@d"], ["é@d"]),
        (r"(?i)\w", ["k", "K"], ["\u212a"]),
        (r"\p{L}+\p{Nd}", ["é٣"], ["11"]),
        (r"[]\d]+[[:digit:]]", ["]10"], ["]]]"]),
        (r"\\d", [r"\d"], ["1"]),
    ],
)
def test_classes_of_a_regular_expression_are_ascii(
    pattern: str, inside: list[str], outside: list[str]
) -> None:
    assert [text for text in inside if not accepts(Kind.REGEX, pattern, text)] == []
    assert [text for text in outside if accepts(Kind.REGEX, pattern, text)] == []


@pytest.mark.parametrize(
    ("pattern", "inside", "outside"),
    [
        (r"^\d+$", ["12"], ["٣", "a"]),
        (r"^\s\D\W$", [" a-"], ["\u00a0a-", " 1-"]),
        (r"^\p{L}$", ["é"], ["1"]),
        (r"^[^[\]]+$", ["ab"], ["["]),
        (r"^(?=.*\d)(?=.*[A-Z]).{3,}$", ["aB1"], ["aB", "abc", "ab1"]),
        (r"^\<\w+\>$", ["<a>"], ["a"]),
    ],
)
def test_pattern_of_a_schema_is_ascii_and_javascript(
    pattern: str, inside: list[str], outside: list[str]
) -> None:
    schema = {"type": "string", "pattern": pattern}
    assert [text for text in inside if not holds(schema, text)] == []
    assert [text for text in outside if holds(schema, text)] == []


@pytest.mark.parametrize("name", ["phone", "password", "int32", "binary", "regex", "json-pointer", "color"])
def test_unknown_format_is_an_annotation(name: str) -> None:
    assert holds({"type": "object", "properties": {"a": {"type": "string", "format": name}}}, {"a": "x"})
    assert not holds({"type": "string", "format": "uuid"}, "x")


@pytest.mark.parametrize(
    ("names", "inside", "outside"),
    [
        ({"$ref": "#/$defs/Day"}, {"Mo": 1, "We": 2}, {"Su": 1}),
        ({"pattern": r"^\d+$"}, {"12": 1}, {"a": 1}),
        ({"minLength": 2, "maxLength": 3, "type": "string"}, {"ab": 1, "é😀x": 2}, {"abcd": 1}),
        ({"const": "a.b"}, {"a.b": 1}, {"axb": 1}),
        ({"enum": ["Zoë", "𝒳-1"]}, {"Zoë": 1, "𝒳-1": 2}, {"Zoe": 1}),
        ({"type": "string"}, {"any": 1}, {"any": "x"}),
        ({"format": "phone"}, {"any": 1}, {"any": "x"}),
    ],
)
def test_property_names_are_held(names: Any, inside: object, outside: object) -> None:
    schema = {
        "type": "object",
        "additionalProperties": {"type": "integer"},
        "propertyNames": names,
        **WEEKDAYS,
    }
    assert holds(schema, inside)
    assert not holds(schema, outside)


def test_unique_items_of_few_values_are_held() -> None:
    for items in ({"$ref": "#/$defs/Day"}, {"enum": ["Mo", "Tu", "We"]}):
        schema = {"type": "array", "items": items, "uniqueItems": True, "minItems": 1, **WEEKDAYS}
        for value in (["Mo"], ["We", "Mo"], ["Tu", "We", "Mo"]):
            assert holds(schema, value)
        for value in ([], ["Mo", "Mo"], ["Su"]):
            assert not holds(schema, value)
    assert holds({"type": "array", "uniqueItems": False}, [1, 1])
    assert holds({"type": "array", "items": {"type": "string"}, "maxItems": 1, "uniqueItems": True}, ["a"])


def nested(part: Any) -> Any:
    return {"type": "object", "properties": {"tags": {"anyOf": [{"type": "null"}, part]}}}


@pytest.mark.parametrize(
    ("part", "word"),
    [
        ({"type": "array", "items": {"type": "string"}, "uniqueItems": True}, "uniqueItems"),
        ({"type": "object", "properties": {"a": {}}, "propertyNames": {"pattern": "^a"}}, "propertyNames"),
        ({"type": "string", "pattern": "^(?!a)"}, "look-around"),
        ({"type": "string", "pattern": r"\bfoo"}, r"word boundary (\b"),
        ({"type": "array", "contains": {"type": "string"}}, "contains"),
    ],
)
def test_refusal_has_the_path_and_leniency_none(part: Any, word: str) -> None:
    refused = refusal(Kind.JSON_SCHEMA, nested(part))
    assert word in refused
    assert refused.endswith(", at properties.tags.anyOf[1]")
    assert word in refusal(Kind.JSON_SCHEMA, part)
    assert holds({**nested(part), "x-guidance": {"lenient": True}}, {"tags": None})


def test_word_boundary_of_a_regular_expression_is_refused_with_the_reason() -> None:
    assert "word boundary" in refusal(Kind.REGEX, r"a\b")
    assert refusal(Kind.REGEX, r"\d(a").endswith("at character 3 of a regular expression")


def test_values_that_are_no_schemas_stay_as_they_are() -> None:
    value = {"format": "phone", "pattern": r"\d"}
    assert holds({"const": value}, value)
    assert holds({"enum": [value]}, value)
