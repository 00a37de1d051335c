"""Constraints at each limit and one above, and their form; what compiles is the business of other tests."""

from __future__ import annotations

import time
from typing import Any

import pytest

from diptych.runtime.errors import DiptychError, InvalidParameter, UnsupportedFeature
from diptych.runtime.grammar.grammar import Grammar, Kind
from diptych.v1 import inference_pb2 as pb
from gateway import limits
from gateway.request.structured_output import STRUCTURED_OUTPUTS, structured_output


def grammar(**asked: Any) -> Grammar | None:
    found = structured_output(pb.StructuredOutput(**asked))
    return None if found is None else found.grammar


def field_of(kind: type[DiptychError], **asked: Any) -> str:
    with pytest.raises(kind) as caught:
        grammar(**asked)
    (violation,) = caught.value.violations
    return violation.field


def test_every_constraint_is_named_or_refused() -> None:
    fields = {field.name for field in pb.StructuredOutput.DESCRIPTOR.fields}
    assert fields == {*STRUCTURED_OUTPUTS, "structural_tag"}
    assert field_of(UnsupportedFeature, structural_tag="{}") == "structured_output.structural_tag"


def test_absent_structured_output_is_no_constraint() -> None:
    assert grammar() is None
    assert grammar(json_object=False) is None


@pytest.mark.parametrize("kind", ["json_schema", "regex", "ebnf_grammar"])
def test_size_at_the_limit_and_one_above(kind: str) -> None:
    def of(size: int) -> str:
        head, tail = {
            "json_schema": ('{"title":"', '"}'),
            "regex": ("", ""),
            "ebnf_grammar": ('root::="', '"'),
        }[kind]
        return head + "x" * (size - len(head) - len(tail)) + tail

    assert grammar(**{kind: of(limits.MAX_GRAMMAR_BYTES)}) is not None
    path = f"structured_output.{kind}"
    assert field_of(InvalidParameter, **{kind: of(limits.MAX_GRAMMAR_BYTES + 1)}) == path
    wide = of(limits.MAX_GRAMMAR_BYTES).replace("x", "é", 1)
    assert field_of(InvalidParameter, **{kind: wide}) == path
    assert field_of(InvalidParameter, **{kind: ""}) == path


def test_depth_of_a_schema_at_the_limit_and_one_above() -> None:
    def nested(depth: int) -> str:
        return '{"not":' * (depth - 1) + "{}" + "}" * (depth - 1)

    assert grammar(json_schema=nested(limits.MAX_SCHEMA_DEPTH)) is not None
    over = nested(limits.MAX_SCHEMA_DEPTH + 1)
    assert field_of(InvalidParameter, json_schema=over) == "structured_output.json_schema"
    for text in ("[" * 99, r"\"" + "{" * 99, "\\\\", r"}\\\"" + "[" * 99):
        assert grammar(json_schema=f'{{"title": "{text}"}}') is not None
        behind = f'{{"title": "{text}", "not": {over}}}'
        with pytest.raises(InvalidParameter, match="nested"):
            grammar(json_schema=behind)


@pytest.mark.parametrize("text", ['{"' + "\\" * 60_000, '{"' + '\\"' * 30_000, '{"a' * 20_000, '"' * 60_001])
def test_depth_of_strings_without_an_end_is_found_in_no_time(text: str) -> None:
    begin = time.process_time()
    assert field_of(InvalidParameter, json_schema=text) == "structured_output.json_schema"
    assert time.process_time() - begin < 1.0


@pytest.mark.parametrize(
    "text",
    [
        "[",
        "[1]",
        "1",
        "null",
        '{"a": NaN}',
        "{}{}",
        '{"a": ' + "9" * 5000 + "}",
        "}" * 99,
        r'{"title": "\ud83d"}',  # half of a surrogate pair
        r'{"enum": [{"\ude00\ud83d": 1}]}',
    ],
)
def test_a_schema_is_a_json_object(text: str) -> None:
    assert field_of(InvalidParameter, json_schema=text) == "structured_output.json_schema"


def test_choices_at_their_limits_and_one_above() -> None:
    def of(*values: str) -> dict[str, Any]:
        return {"choice": pb.StructuredOutput.Choices(values=values)}

    values = "structured_output.choice.values"
    assert grammar(**of(*(["a"] * limits.MAX_CHOICES))) is not None
    assert field_of(InvalidParameter, **of(*(["a"] * (limits.MAX_CHOICES + 1)))) == values
    assert grammar(**of("a" * (limits.MAX_GRAMMAR_BYTES - 1), "b")) is not None
    assert field_of(InvalidParameter, **of("a" * limits.MAX_GRAMMAR_BYTES, "b")) == values
    assert field_of(InvalidParameter, **of()) == values
    assert field_of(InvalidParameter, **of("a", "")) == f"{values}[1]"


def test_choices_are_themselves() -> None:
    found = grammar(choice=pb.StructuredOutput.Choices(values=["a.b", "é|\n"]))
    assert found == Grammar(Kind.REGEX, r"a\x{2e}b|\x{e9}\x{7c}\x{a}")


def test_bad_grammar_names_the_place() -> None:
    with pytest.raises(InvalidParameter, match="line 2: a parenthesis is missing"):
        grammar(ebnf_grammar='root ::= x\nx ::= ("a"')
