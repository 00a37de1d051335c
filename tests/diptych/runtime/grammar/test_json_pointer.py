from __future__ import annotations

import pytest

from diptych.runtime.grammar.json_pointer import referenced_part

ROOT = {"$defs": {"a/b~c": {"type": "string"}, "0": {"const": 0}}, "allOf": [{"const": 1}, {"const": 2}]}


@pytest.mark.parametrize(
    ("reference", "part"),
    [
        ("#", ROOT),
        ("#/$defs/a~1b~0c", {"type": "string"}),
        ("#/$defs/0", {"const": 0}),
        ("#/allOf/1", {"const": 2}),
        ("#/allOf/2", None),
        ("#/allOf/-1", None),
        ("#/allOf/x", None),
        ("#/allOf/01", None),
        (f"#/allOf/{'9' * 5000}", None),
        ("#/$defs/no/such", None),
        ("#/$defs/0/const/deeper", None),
        ("https://example.org/schema#/$defs/0", None),
        (7, None),
        (None, None),
    ],
)
def test_referenced_part_is_that_of_the_fragment(reference: object, part: object) -> None:
    assert referenced_part(ROOT, reference) == part
