"""Compilation of a grammar's text to llguidance's matcher, with a bound on everything it may use."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Final

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from diptych.runtime.grammar.closed_objects import close_objects
from diptych.runtime.grammar.error_text import fault_of
from diptych.runtime.grammar.grammar import BadGrammar, Grammar, Kind

# Fuel is llguidance's count of elementary work: about 50,000 a millisecond while a lexer is built, 14,000 in
# a step, and 20,000 parser items. A step of one row delays every row of its batch.
LIMITS: Final = LLParserLimits(
    initial_lexer_fuel=1_000_000,
    step_lexer_fuel=200_000,
    step_max_items=50_000,
    max_items_in_row=2_000,
    max_lexer_states=50_000,  # 1 to 2 KB each
    max_grammar_size=100_000,
    verbose_errors=False,  # they quote the grammar
)

# Between two tokens of JSON: nothing, a space, or a new line and its indentation. Without a bound a model
# that is unsure writes white space until its tokens run out.
_BOUNDED: Final = {"x-guidance": {"whitespace_pattern": r" |\n[ \t]{0,24}"}}
# Where the grammar leaves one continuation only, llguidance would let come the one token that a tokenizer
# begins it with, and nothing else. A mask that allows all that fits is what a reader expects, and does not
# depend on how the text before is cut into tokens.
_HEADER: Final = '%llguidance {"no_forcing": true}\n'


def new_matcher(grammar: Grammar, tokenizer: LLTokenizer) -> LLMatcher:
    """Return a matcher at the start of `grammar`, its first mask computed. Raises `BadGrammar`.

    Releases the GIL while it works, milliseconds as a rule. Hostile grammars can take any time.
    """
    try:
        source = _HEADER + _SOURCES[grammar.kind](grammar.text)
    except (ValueError, RecursionError) as error:
        raise BadGrammar("is no JSON object, or is nested too deep") from error
    matcher = LLMatcher(tokenizer, source, log_level=0, limits=LIMITS)
    if not matcher.is_error():
        matcher.compute_bitmask()
    if matcher.is_error():
        raise BadGrammar(fault_of(matcher.get_error()))
    return matcher


def embedded_schema(schema: Mapping[str, object]) -> str:
    """Return a JSON schema as a Lark grammar takes it after a rule's name.

    White space is bounded, and objects are closed unless they say otherwise.
    """
    return f"%json {json.dumps(close_objects(schema) | _BOUNDED)}"


def _json_schema(text: str) -> str:
    # Read and written anew, so that nothing but one object gets into the grammar's text.
    schema = json.loads(text)
    if not isinstance(schema, dict):
        raise ValueError("a schema is an object")
    return f"start: {embedded_schema(schema)}"


def _regex(text: str) -> str:
    source: str = json.loads(LLMatcher.grammar_from_regex(text))["grammars"][0]["lark_grammar"]
    return source


def _lark(text: str) -> str:
    return text


_SOURCES: Final = {Kind.JSON_SCHEMA: _json_schema, Kind.REGEX: _regex, Kind.LARK: _lark}
