"""Grammars compiled and walked byte by byte: what they let through, and what is said of bad ones."""

from __future__ import annotations

import json

import pytest
from llguidance import LLTokenizer

from diptych.runtime.grammar.grammar import BadGrammar, Grammar, Kind
from diptych.runtime.grammar.matcher import new_matcher

BYTES = LLTokenizer("byte")
POINT = {
    "type": "object",
    "properties": {"x": {"type": "integer"}, "y": {"type": "integer"}},
    "required": ["x", "y"],
    "additionalProperties": False,
}


def matches(grammar: Grammar, text: str) -> bool:
    matcher = new_matcher(grammar, BYTES)
    data = list(text.encode())
    return matcher.try_consume_tokens(data) == len(data) and matcher.is_accepting()


@pytest.mark.parametrize(
    ("kind", "grammar", "good", "bad"),
    [
        (Kind.REGEX, "[a-c]{2}|é+", ["ab", "é", "éé"], ["a", "abc", "", "abé"]),
        (Kind.LARK, 'start: "(" start ")" | "x"', ["x", "((x))"], ["(x", "()"]),
        (
            Kind.JSON_SCHEMA,
            json.dumps(POINT),
            ['{"x":1,"y":-2}', '{"x": 1, "y": 2}', '{\n  "x": 1,\n  "y": 2\n}'],
            ['{"x":1}', '{"x":1,"y":2,"z":3}', '{"x":1.5,"y":2}', '{"x":1,"y":2} ', ' {"x":1,"y":2}'],
        ),
        (Kind.JSON_SCHEMA, '{"type": "object"}', ["{}", '{"a":[1,{"b":null}]}'], ["[]", "1", "{"]),
    ],
)
def test_what_matches(kind: Kind, grammar: str, good: list[str], bad: list[str]) -> None:
    for text in good:
        assert matches(Grammar(kind, grammar), text), text
    for text in bad:
        assert not matches(Grammar(kind, grammar), text), text


def test_white_space_in_json_is_bounded() -> None:
    grammar = Grammar(Kind.JSON_SCHEMA, '{"type": "object"}')
    assert matches(grammar, "{\n" + " " * 24 + '"a":1}')
    assert not matches(grammar, "{\n" + " " * 25 + '"a":1}')
    assert not matches(grammar, '{\n\n"a":1}')
    # A schema cannot lift the bound with the library's own keyword.
    opened = '{"type": "object", "x-guidance": {"whitespace_pattern": "[ ]*"}}'
    assert not matches(Grammar(Kind.JSON_SCHEMA, opened), '{  "a":1}')


@pytest.mark.parametrize("text", ["a/b", "a/\nstart: /b", 'a\nb: "c"', "a\\/b", "[/]", "é/\t"])
def test_an_expression_cannot_leave_its_place(text: str) -> None:
    assert matches(Grammar(Kind.REGEX, text), text.replace("\\/", "/").replace("[/]", "/"))


def test_a_schema_cannot_leave_its_place() -> None:
    for text in ('{"type": "null"} "x"', '{"type": "null"}\nother: "x"', '{"type": "null"} %json {}'):
        with pytest.raises(BadGrammar, match="no JSON object"):
            new_matcher(Grammar(Kind.JSON_SCHEMA, text), BYTES)


def test_all_tokens_that_fit_may_come() -> None:
    """Also where only one text can follow: any cut of it into tokens is right."""

    class Vocabulary:
        bos_token_id, eos_token_id, is_tokenizer_wrapper = None, 0, True
        tokens, special_token_ids = (b"</s>", b'"', b"a", b'"a', b'"a"', b"b"), (0,)

        def __call__(self, text: str) -> list[int]:
            return [4]

    for grammar in (
        Grammar(Kind.JSON_SCHEMA, '{"const": "a"}'),
        Grammar(Kind.REGEX, '"a"'),
        Grammar(Kind.LARK, r'start: "\"a\""'),
    ):
        mask = new_matcher(grammar, LLTokenizer(Vocabulary())).compute_bitmask()  # type: ignore[arg-type]
        assert mask[0] == 0b011010


@pytest.mark.parametrize(
    ("kind", "grammar", "fault"),
    [
        (Kind.REGEX, "(secret", "is not valid: unclosed group, at character 1 of a regular expression"),
        (Kind.REGEX, "secret limit[z-a]", "must be <= the end, at character 14 of"),
        (Kind.REGEX, "(" * 10_000 + "a" + ")" * 10_000, "is not valid"),
        (Kind.REGEX, r"[^\s\S]", "nothing can satisfy"),
        (Kind.REGEX, "(?=secret)b", "look-around"),
        (Kind.REGEX, r"(secret)\1", "back references"),
        (Kind.JSON_SCHEMA, "{secret", "no JSON object"),
        (Kind.JSON_SCHEMA, "[1]", "no JSON object"),
        (Kind.JSON_SCHEMA, '{"type": "secret"}', "has a type that is not one of JSON Schema's$"),
        (
            Kind.JSON_SCHEMA,
            '{"properties": {"size": {"anyOf": [{"type": "null"}, {"type": "secret"}]}}}',
            r"JSON Schema's, at properties\.size\.anyOf\[1\]$",
        ),
        (Kind.JSON_SCHEMA, '{"$ref": 5, "description": "secret"}', r"is not valid: \$ref must be a string"),
        (
            Kind.JSON_SCHEMA,
            '{"items": {"$ref": "#/$defs/secret"}, "$defs": {"a": {}}}',
            "a definition that is not there, at items$",
        ),
        (Kind.JSON_SCHEMA, '{"properties": {"limit": {"minLength": "secret"}}}', "minLength must be an int"),
        (Kind.JSON_SCHEMA, '{"minimum": "secret"}', "is not valid: minimum must be a number"),
        (Kind.LARK, 'start: "a" # too many secrets\n| )', "is not valid at line 2"),
        (Kind.JSON_SCHEMA, '{"enum": "secret"}', "is not valid: enum must be an array"),
        (
            Kind.JSON_SCHEMA,
            '{"minLength": "secret"}',
            "is not valid: minLength must be an integer of at least 0",
        ),
        (Kind.JSON_SCHEMA, '{"$ref": "#/definitions/secret"}', "refers to a definition"),
        (Kind.JSON_SCHEMA, '{"$ref": "#"}', "nothing can satisfy"),
        (Kind.JSON_SCHEMA, "false", "no JSON object"),
        (Kind.JSON_SCHEMA, '{"$ref": "http://secret/x.json"}', "another document"),
        (Kind.JSON_SCHEMA, '{"type": "array", "uniqueItems": true}', "not supported: uniqueItems"),
        (Kind.JSON_SCHEMA, '{"oneOf": [{"minLength": 1}, {"minLength": 2}]}', "oneOf"),
        (Kind.JSON_SCHEMA, '{"items":' * 1000 + "{}" + "}" * 1000, "nested too deep"),
        (Kind.LARK, "start: secret", "uses a rule that it does not define"),
        (Kind.LARK, "secret: /a/", "no rule of the name start"),
        (Kind.LARK, 'start: a\na: "secret', "is not valid at line 2, column 11"),
        (Kind.LARK, "", "is not valid|no rule of the name"),
    ],
)
def test_bad_grammars_are_named_and_not_quoted(kind: Kind, grammar: str, fault: str) -> None:
    with pytest.raises(BadGrammar, match=fault) as raised:
        new_matcher(Grammar(kind, grammar), BYTES)
    assert "secret" not in str(raised.value)


def test_digests_tell_kinds_apart() -> None:
    assert Grammar(Kind.REGEX, "a").digest != Grammar(Kind.LARK, "a").digest
    assert Grammar(Kind.REGEX, "a").digest == Grammar(Kind.REGEX, "a").digest
