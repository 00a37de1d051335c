"""GBNF grammars: what they come to, against a matcher written out; and what is said of bad ones."""

from __future__ import annotations

import itertools
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st
from llguidance import LLTokenizer

from diptych.runtime.grammar.grammar import BadGrammar, Kind
from diptych.runtime.grammar.matcher import new_matcher
from gateway.request.gbnf.nodes import BadGbnf, Chars, Choice, Name, Node, Repeat, Sequence
from gateway.request.gbnf.parser import MAX_DEPTH, MAX_REPEATS, parse
from gateway.request.gbnf.translate import translate

BYTES = LLTokenizer("byte")
JSON = r"""
root   ::= object
value  ::= object | array | string | number | ("true" | "false" | "null") ws
object ::= "{" ws ( string ":" ws value ("," ws string ":" ws value)* )? "}" ws
array  ::= "[" ws ( value ("," ws value)* )? "]" ws
string ::=
  "\"" (
    [^"\\\x7F\x00-\x1F] |
    "\\" (["\\bfnrt] | "u" [0-9a-fA-F]{4}) # escapes
  )* "\"" ws
number ::= ("-"? ([0-9] | [1-9] [0-9]{0,15})) ("." [0-9]+)? ([eE] [-+]? [0-9] [1-9]{0,15})? ws
ws ::= | " " | "\n" [ \t]{0,20}
"""


def matches(grammar: str, text: str) -> bool:
    matcher = new_matcher(translate(grammar), BYTES)
    data = list(text.encode())
    return matcher.try_consume_tokens(data) == len(data) and matcher.is_accepting()


@pytest.mark.parametrize(
    ("grammar", "kind", "good", "bad"),
    [
        ('root ::= [a-z]* "end"', Kind.REGEX, ["end", "endend", "xxend"], ["en", "endx"]),
        ('root ::= "a"{2,3} | ("b" | "c")+ "é" .', Kind.REGEX, ["aa", "aaa", "bcé\n"], ["a", "aaaa", "é."]),
        ("root ::= [^a-c\\n]? [\\u00e9-]", Kind.REGEX, ["é", "-", "dé"], ["aé", "\né", "ab"]),
        ('root ::= x "." # comment ::= no rule\nx ::= y\n  | "z"\ny ::= ""', Kind.REGEX, [".", "z."], ["y."]),
        ('root ::= root "a" | "b"', Kind.LARK, ["b", "baa"], ["a", ""]),
        ('root ::= "" | "(" root ")"', Kind.LARK, ["", "(())"], ["(", "())"]),
        ('root ::= [a-z]* tail\ntail ::= "end" | "!" root', Kind.LARK, ["end", "xend!endend"], ["end!"]),
        (
            JSON,
            Kind.LARK,
            ['{"a":[1,{"b":null}]}', '{"é\\u00e9": -1.5e3 }', "{}"],
            ["[]", '{"a":}', '{"a":01}'],
        ),
    ],
)
def test_grammar_matches_what_it_should(grammar: str, kind: Kind, good: list[str], bad: list[str]) -> None:
    assert translate(grammar).kind is kind
    for text in good:
        assert matches(grammar, text), text
    for text in bad:
        assert not matches(grammar, text), text


@pytest.mark.parametrize(
    ("grammar", "fault"),
    [
        ("", "no rule root"),
        ('secret ::= "a"', "no rule root"),
        ("root ::= secret", "line 1: a rule is used that is not defined"),
        ('root ::= a\na ::= ("b" |\n secret)\n', "line 3: a rule is used that is not defined"),
        ('root ::= "a"\nroot ::= "b"', "line 2: this rule was defined before"),
        ("root = secret", "line 1: ::= is expected"),
        ('root ::= "secret', "has no end"),
        ("root ::= [secret", "has no end"),
        ("root ::= []", "no characters"),
        ("root ::= [z-a]", "upside down"),
        ('root ::= "\\q"', "escape is not known"),
        ('root ::= "\\uD800"', "no character"),
        ('root ::= "\\UFFFFFFFF"', "no character"),
        ('root ::= ("a"', "parenthesis is missing"),
        ('root ::= "a")', "name is expected"),
        ('root ::= "a"**', "name is expected"),
        ('root ::= "a"{3,2}', "in order"),
        (f'root ::= "a"{{{MAX_REPEATS + 1}}}', "in order and at most"),
        ('root ::= "a"{x}', "bounds are"),
        ("root ::= " + "(" * (MAX_DEPTH + 1) + '"a"' + ")" * (MAX_DEPTH + 1), "nested too deep"),
        ('root ::= "a"\n' + "\n".join(f'r{n} ::= "b"' for n in range(1024)), "more than 1024 rules"),
    ],
)
def test_bad_grammars_are_named_and_not_quoted(grammar: str, fault: str) -> None:
    with pytest.raises(BadGbnf, match=fault) as raised:
        translate(grammar)
    assert "secret" not in str(raised.value)


def test_grammars_at_the_limits_are_read() -> None:
    assert matches("root ::= " + "(" * MAX_DEPTH + '"a"' + ")" * MAX_DEPTH, "a")
    assert matches(f'root ::= "a"{{{MAX_REPEATS}}}', "a" * MAX_REPEATS)
    # Forty rules that each use the last one twice: written out, a regular expression of terabytes.
    doubling = (
        "root ::= r40\n" + "\n".join(f"r{n} ::= r{n - 1} r{n - 1}" for n in range(1, 41)) + '\nr0 ::= ""'
    )
    assert translate(doubling).kind is Kind.LARK


@pytest.mark.parametrize(
    "grammar",
    [
        'a ::= "' + "x" * 4000 + '"\nroot ::= ' + "a " * 16_000,  # a gigabyte
        'a ::= "' + "x" * 4000 + '"\nroot ::= ' + "a | " * 10_000 + "a",
        # A thousand rules, each a little longer than the last: 60 KiB each.
        "root ::= r0\n"
        + "\n".join(f'r{n} ::= r{n + 1} "a"' for n in range(1000))
        + '\nr1000 ::= "'
        + "x" * 2500
        + '"',
    ],
    ids=["sequence", "choice", "chain"],
)
def test_a_small_grammar_takes_little_memory(grammar: str) -> None:
    tracemalloc.start()
    try:
        assert translate(grammar).kind is Kind.LARK
        assert tracemalloc.get_traced_memory()[1] < 24 << 20
    finally:
        tracemalloc.stop()


def written_out(rules: dict[str, Node], node: Node, text: str, at: int, depth: int) -> frozenset[int]:
    """Where a match of `node` that begins at `at` can end; by trying everything."""
    if depth > 40:
        return frozenset()
    match node:
        case Chars(ranges):
            fits = at < len(text) and any(low <= ord(text[at]) <= high for low, high in ranges)
            return frozenset((at + 1,)) if fits else frozenset()
        case Name(rule):
            return written_out(rules, rules[rule], text, at, depth + 1)
        case Choice(options):
            return frozenset().union(*(written_out(rules, one, text, at, depth + 1) for one in options))
        case Sequence(items):
            ends = frozenset((at,))
            for item in items:
                ends = frozenset().union(*(written_out(rules, item, text, end, depth + 1) for end in ends))
            return ends
        case Repeat(item, least, most):
            ends, found = frozenset((at,)), set[int]()
            for count in range(len(text) + least + 1):
                if count >= least:
                    found |= ends
                if count == most or not ends:
                    break
                ends = frozenset().union(*(written_out(rules, item, text, end, depth + 1) for end in ends))
            return frozenset(found)


def items(names: list[str]) -> st.SearchStrategy[str]:
    """Right-hand sides over the letters a and b. Rules are used after a letter only: no left recursion."""
    leaf = st.sampled_from(['"a"', '"b"', '"ab"', "[ab]", "[^a]", '""', *(f'"a" {name}' for name in names)])
    return st.recursive(
        leaf,
        lambda inner: st.one_of(
            st.lists(inner, min_size=1, max_size=3).map(lambda parts: f"({' | '.join(parts)})"),
            st.lists(inner, min_size=1, max_size=3).map(" ".join),
            st.tuples(inner, st.sampled_from(["?", "{0,2}", "{2}"])).map(lambda it: f"({it[0]}){it[1]}"),
            st.sampled_from(['"a"*', "[ab]*", '"b"+', '("ab")*']),
        ),
        max_leaves=6,
    )


@given(sides=st.tuples(items(["root", "x"]), items(["root", "x"])))
def test_means_what_a_matcher_written_out_finds(sides: tuple[str, str]) -> None:
    grammar = f"root ::= {sides[0]}\nx ::= {sides[1]}"
    rules = parse(grammar)
    try:
        new_matcher(translate(grammar), BYTES)
    except BadGrammar:
        return  # nothing matches it, or it is ambiguous beyond the bounds
    for length in range(4):
        for letters in itertools.product("ab", repeat=length):
            text = "".join(letters)
            expected = len(text) in written_out(rules, rules["root"], text, 0, 0)
            assert matches(grammar, text) == expected, (grammar, text)
