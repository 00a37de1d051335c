"""Compilation of a grammar's text to llguidance's matcher, with a bound on everything it may use."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Final

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from diptych.runtime.grammar.closed_objects import close_objects
from diptych.runtime.grammar.error_text import (
    LOOK_AROUND_WORD,
    LOST_REFERENCE,
    NO_BOUNDARY,
    NOT_VALID,
    UNKNOWN_TYPE,
    fault_of,
    keywords_in,
)
from diptych.runtime.grammar.grammar import BadGrammar, Grammar, Kind
from diptych.runtime.grammar.json_schema import GUIDANCE, is_lenient, prepare_schema
from diptych.runtime.grammar.patterns import ascii_classes, has_word_boundary
from diptych.runtime.grammar.schema_parts import (
    has_boundary,
    has_keyword,
    has_look_around,
    has_lost_reference,
    has_unknown_type,
    place_of,
)

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
_BOUNDED: Final = {"whitespace_pattern": r" |\n[ \t]{0,24}"}
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
        raise BadGrammar(_fault(grammar, matcher.get_error(), tokenizer))
    return matcher


def _fault(grammar: Grammar, error: str, tokenizer: LLTokenizer) -> str:
    """Return what is wrong with a grammar, and where, in words that quote none of its values."""
    fault = fault_of(error)
    if grammar.kind is Kind.REGEX:
        if has_word_boundary(grammar.text):
            return NO_BOUNDARY
        # A place is in the client's own text.
        source = _HEADER + _lark_of_regex(grammar.text)
        own = LLMatcher(tokenizer, source, log_level=0, limits=LIMITS)
        return fault_of(own.get_error()) if own.is_error() else fault
    if grammar.kind is not Kind.JSON_SCHEMA:
        return fault
    schema = json.loads(grammar.text)
    if (missing := keywords_in(fault)) is not None:
        at = place_of(schema, has_keyword(missing))
    elif fault == UNKNOWN_TYPE:
        at = place_of(schema, has_unknown_type)
    elif fault == LOST_REFERENCE:
        at = place_of(schema, has_lost_reference(schema))
    elif LOOK_AROUND_WORD in error:
        at = place_of(schema, has_look_around)
    elif fault == NOT_VALID and ((at := place_of(schema, has_boundary)) or has_boundary(schema)):
        fault = NO_BOUNDARY
    else:
        return fault
    return f"{fault}, at {at}" if at else fault


def embedded_schema(schema: Mapping[str, object]) -> str:
    """Return a JSON schema as a Lark grammar takes it after a rule's name.

    White space is bounded, and objects are closed unless they say otherwise.
    """
    guidance = {**_BOUNDED, "lenient": True} if is_lenient(schema) else _BOUNDED
    return f"%json {json.dumps(close_objects(prepare_schema(schema)) | {GUIDANCE: guidance})}"


def _json_schema(text: str) -> str:
    # Read and written anew, so that nothing but one object gets into the grammar's text.
    schema = json.loads(text)
    if not isinstance(schema, dict):
        raise ValueError("a schema is an object")
    return f"start: {embedded_schema(schema)}"


def _regex(text: str) -> str:
    return _lark_of_regex(ascii_classes(text))


def _lark_of_regex(text: str) -> str:
    source: str = json.loads(LLMatcher.grammar_from_regex(text))["grammars"][0]["lark_grammar"]
    return source


def _lark(text: str) -> str:
    return text


_SOURCES: Final = {Kind.JSON_SCHEMA: _json_schema, Kind.REGEX: _regex, Kind.LARK: _lark}
