"""Error texts of grammars, which quote none of them."""

from __future__ import annotations

import re
from typing import Final

_KEYWORD: Final = re.compile(r'"(\$?[A-Za-z]{1,24})"')
# JSON Schema's own words may be named in an error: the caller did not invent them.
_KEYWORDS: Final = frozenset(
    [
        *("$dynamicRef", "$recursiveRef", "contains", "contentEncoding", "contentMediaType", "contentSchema"),
        *(
            "dependencies",
            "dependentRequired",
            "dependentSchemas",
            "else",
            "if",
            "maxContains",
            "maxProperties",
        ),
        *("minContains", "minProperties", "not", "propertyNames", "then", "unevaluatedItems"),
        *("unevaluatedProperties", "uniqueItems"),
    ]
)
NOT_VALID: Final = "is not valid"
NO_BOUNDARY: Final = (
    "has a word boundary (\\b or \\B), which is not supported: name the characters that may stand there"
)
LOOK_AROUND_WORD: Final = "look-around"
UNKNOWN_TYPE: Final = "has a type that is not one of JSON Schema's"
LOST_REFERENCE: Final = "refers to a definition that is not there"
_NO_KEYWORDS: Final = "has keywords that are not supported: "
_FAULTS: Final = (
    ("Unsatisfiable", "nothing can satisfy it"),
    ("NoExtension", "nothing can satisfy it"),
    ("oneOf constraints", "has a oneOf whose alternatives are not told apart by their types; anyOf is"),
    ("Unknown format", "has a format that is not known here"),
    (LOOK_AROUND_WORD, "has look-around, which is not supported"),
    ("backreferences", "has back references, which are not supported"),
    ("not present in a registry", "refers to another document"),
    ("Invalid type", UNKNOWN_TYPE),
    ("does not exist", LOST_REFERENCE),
    ("unknown name", "uses a rule that it does not define"),
    ("no start rule", "has no rule of the name start"),
    ("recursion limit", "is nested too deep"),
    ("too large", "is too complex"),
    ("too many", "is too complex"),
    ("too complex", "is too complex"),
    ("fuel", "is too complex"),
    ("limit", "is too complex"),
    ("Unable to determine", "is too complex"),
)
# What the libraries say in words of their own: of a regular expression with a mark below the place, of a
# schema's keyword, of a place in a grammar (whose first line is ours).
_IN_REGEX: Final = re.compile(
    r"regex parse error:\n {4}.*\n {4}( *)\^+\nerror: ([A-Za-z][A-Za-z ,<=>-]{1,100})\n"
)
_MUST_BE: Final = re.compile(r"JSON schema: ([a-zA-Z$]{1,24}) must be ([a-z ]{1,43})(?:,|\n)")
_EXPECTED: Final = re.compile(r"JSON schema: Expected ([a-z0-9 ]{1,40}) for '([a-zA-Z$]{1,24})'")
_KINDS: Final = {
    "f64": "a number",
    "positive integer": "an integer of at least 0",
    "string": "a string",
    "array": "an array",
    "object": "an object",
}
_PLACE: Final = re.compile(r"^(\d+)\((\d+)\): ")


def fault_of(error: str) -> str:
    """llguidance's words quote the grammar; these do not. They go on after the name of its field."""
    head = error.split("<state>", 1)[0]
    in_regex = _IN_REGEX.search(head)
    # Below stands the grammar itself, with any words.
    words = head.split("\n", 1)[0] if in_regex is None else in_regex[2]
    if "Unimplemented keys" in words:
        known = sorted(_KEYWORDS.intersection(_KEYWORD.findall(words)))
        return f"{_NO_KEYWORDS}{', '.join(known)}" if known else "is not supported"
    fault = next((fault for word, fault in _FAULTS if word in words), None)
    return fault or _placed(head) or NOT_VALID


def keywords_in(fault: str) -> frozenset[str] | None:
    """Return the keywords that a fault from `fault_of` says are missing; None if it is another."""
    return frozenset(fault.removeprefix(_NO_KEYWORDS).split(", ")) if fault.startswith(_NO_KEYWORDS) else None


def _placed(error: str) -> str | None:
    """Return the fault and its place, where the error has one."""
    if (found := _IN_REGEX.search(error)) is not None:
        return f"is not valid: {found[2]}, at character {len(found[1]) + 1} of a regular expression"
    if (found := _MUST_BE.search(error)) is not None:
        return f"is not valid: {found[1]} must be {found[2]}"
    if (found := _EXPECTED.search(error)) is not None:
        return f"is not valid: {found[2]} must be {_KINDS.get(found[1], found[1])}"
    if (found := _PLACE.match(error)) is not None and int(found[1]) > 1:
        return f"is not valid at line {int(found[1]) - 1}, column {found[2]}"
    return None
