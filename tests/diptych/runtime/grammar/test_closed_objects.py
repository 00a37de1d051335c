"""Objects are closed where a schema does not say otherwise; combinations can still be matched."""

from __future__ import annotations

import json
from typing import Any

import pytest
from llguidance import LLTokenizer

from diptych.runtime.grammar.closed_objects import close_objects
from diptych.runtime.grammar.grammar import Grammar, Kind
from diptych.runtime.grammar.matcher import new_matcher

BYTES = LLTokenizer("byte")
PET = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}
DEFS = {"$defs": {"Pet": PET}}
PET_REF = {"$ref": "#/$defs/Pet"}
DAY = {"type": "object", "properties": {"day": {"type": "integer"}}, "required": ["day"]}
BOTH = '{"name":"a","day":1}'


def matches(schema: dict[str, Any], text: str) -> bool:
    matcher = new_matcher(Grammar(Kind.JSON_SCHEMA, json.dumps(schema)), BYTES)
    data = list(text.encode())
    return matcher.try_consume_tokens(data) == len(data) and matcher.is_accepting()


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        (PET, ['{"name":"a"}'], ['{"name":"a","x":1}', "{}"]),
        ({"type": "object", "properties": {}}, ["{}"], ['{"x":1}']),
        ({**PET, "additionalProperties": True}, ['{"name":"a","x":1}'], ["{}"]),
        (
            {**PET, "additionalProperties": {"type": "null"}},
            ['{"name":"a","x":null}'],
            ['{"name":"a","x":1}'],
        ),
        ({"type": "object"}, ["{}", '{"x":{"y":1}}'], ["[]"]),
        ({"type": "array", "items": PET}, ['[{"name":"a"}]'], ['[{"name":"a","x":1}]']),
        ({"type": "object", "properties": {"p": PET}}, ['{"p":{"name":"a"}}'], ['{"p":{"name":"a","x":1}}']),
        ({**DEFS, **PET_REF}, ['{"name":"a"}'], ['{"name":"a","x":1}']),
        ({**DEFS, "anyOf": [PET_REF, {"type": "null"}]}, ['{"name":"a"}', "null"], ['{"name":"a","x":1}']),
        ({"properties": {"a": {"const": {"properties": 1}}}}, ['{"a":{"properties":1}}'], ['{"b":1}']),
        ({"type": "object", "properties": {}, "required": ["a"]}, ['{"a":1}'], ["{}", '{"a":1,"b":1}']),
        (
            {"type": "object", "properties": {}, "patternProperties": {"^x": {"type": "integer"}}},
            ['{"x1":1}', "{}"],
            ['{"y":1}'],
        ),
    ],
)
def test_objects_are_closed_unless_they_say_otherwise(
    schema: dict[str, Any], good: list[str], bad: list[str]
) -> None:
    assert [text for text in good if not matches(schema, text)] == []
    assert [text for text in bad if matches(schema, text)] == []


@pytest.mark.parametrize(
    "schema",
    [
        {"allOf": [PET, DAY]},
        {**DEFS, "allOf": [PET_REF, DAY]},
        {**DEFS, **DAY, "allOf": [PET_REF]},
        {**DEFS, **DAY, **PET_REF},
        {"anyOf": [{"allOf": [{"$ref": "#/$defs/pets/0"}, DAY]}], "$defs": {"pets": [PET]}},
        {**DAY, "anyOf": [PET, {"type": "object", "properties": {"other": {}}, "required": ["other"]}]},
        {"allOf": [{"allOf": [PET]}, {"anyOf": [DAY, {"type": "null"}]}]},
    ],
)
def test_combined_objects_are_closed_together(schema: dict[str, Any]) -> None:
    assert matches(schema, BOTH) or matches(schema, '{"day":1,"name":"a"}')
    for text in ('{"name":"a","day":1,"x":1}', '{"day":1,"name":"a","x":1}', '{"name":"a"}', '{"x":1}'):
        assert not matches(schema, text), text


def test_a_combination_with_an_open_part_stays_open() -> None:
    closed = close_objects({**DEFS, "additionalProperties": True, **PET_REF})
    assert closed["allOf"] == [PET]
    assert matches({"allOf": [PET, {"type": "object", "additionalProperties": True}]}, '{"name":"a","x":1}')


def test_recursive_and_circular_schemas_end() -> None:
    tree = {"type": "object", "properties": {"next": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}}}
    assert matches(tree, '{"next":{"next":null}}')
    assert not matches(tree, '{"next":{"x":null}}')
    circle = {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "properties": {"x": {}}}
    assert close_objects({**circle, "$ref": "#/$defs/a"})["additionalProperties"] is False
    doubling = {
        f"d{i}": {"allOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 2, "properties": {str(i): {}}} for i in range(40)
    }
    assert close_objects({"$defs": doubling, "$ref": "#/$defs/d0"})


CLOSED_TREE: Any = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "children": {"type": "array", "items": {"$ref": "#"}}},
    "required": ["name", "children"],
    "additionalProperties": False,
}
DEFINED_TREE: Any = {
    "$defs": {"tree": json.loads(json.dumps(CLOSED_TREE).replace('"#"', '"#/$defs/tree"'))},
    "$ref": "#/$defs/tree",
}


@pytest.mark.parametrize("schema", [CLOSED_TREE, DEFINED_TREE])
def test_a_recursive_schema_that_is_closed_already_stays_as_it_is(schema: dict[str, Any]) -> None:
    """Compile the form that OpenAI asks for. It was copied into itself until the stack ended."""
    assert close_objects(schema) == schema
    assert matches(schema, '{"name":"a","children":[{"name":"b","children":[]}]}')
    assert not matches(schema, '{"name":"a","children":[{"name":"b","children":[],"x":1}]}')


def test_a_recursive_reference_with_members_beside_it_ends() -> None:
    node = {"properties": {"next": {"$ref": "#/$defs/node", "properties": {"extra": {"type": "integer"}}}}}
    closed = close_objects({"$defs": {"node": node}, "$ref": "#/$defs/node"})
    assert "$ref" not in closed["$defs"]["node"]["properties"]["next"]


def test_the_schema_that_is_given_stays_as_it_is() -> None:
    before = json.dumps(PET)
    close_objects({**DEFS, "allOf": [PET_REF, DAY]})
    assert json.dumps(PET) == before
