"""Drafts of what a JSON schema leaves no choice about."""

from __future__ import annotations

import json
from typing import Any

import pytest

from decode_worker.grammar_draft import likely_tokens
from decode_worker.json_layout import SeenText
from diptych.runtime.settings import resolve_model
from diptych.runtime.tokenizer.tokenizer import Tokenizer
from diptych.worker.v1 import work_pb2
from diptych.worker_process.grammar_masks import Grammars

TEXT = '{"city": "Paris, France", "population": 2, "country_code": "FR"}'
KINDS = {"city": "string", "population": "integer", "country_code": "string"}


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.load(resolve_model("bundled"))


def test_names_and_brackets_are_drafted_and_values_are_not(tokenizer: Tokenizer) -> None:
    schema = {
        "type": "object",
        "properties": {k: {"type": v} for k, v in KINDS.items()},
        "required": [*KINDS],
    }
    message = work_pb2.Grammar(kind=work_pb2.Grammar.KIND_JSON_SCHEMA, text=json.dumps(schema))
    state = Grammars(resolve_model("bundled")).start_now(message)
    ids, at, steps, wrong = tokenizer.encode(TEXT), 0, 0, 0
    while at < len(ids):
        draft = likely_tokens(state, ids[at - 1 : at] if at else [], 7)
        right = next(
            (n for n, pair in enumerate(zip(draft, ids[at:], strict=False)) if pair[0] != pair[1]), None
        )
        right = min(len(draft), len(ids) - at) if right is None else right
        wrong += len(draft) - right
        step = ids[at : at + right + 1]
        state.follow(step)
        at, steps = at + len(step), steps + 1
    assert steps <= len(ids) * 0.55
    assert wrong <= 2


@pytest.mark.parametrize("layout", [{"indent": 3}, {"separators": (",", ":")}], ids=str)
def test_layout_and_cuts_of_the_first_object_are_drafted_in_the_others(
    layout: dict[str, Any], tokenizer: Tokenizer
) -> None:
    """The control knows no layout but the usual one, and no tokens but the usual ones."""
    item = {"type": "object", "properties": {k: {"type": v} for k, v in KINDS.items()}, "required": [*KINDS]}
    message = work_pb2.Grammar(
        kind=work_pb2.Grammar.KIND_JSON_SCHEMA, text=json.dumps({"type": "array", "items": item})
    )
    text = json.dumps([json.loads(TEXT) | {"population": n} for n in (2, 3, 4)], **layout)
    ids = tokenizer.encode(text)
    grammars, steps = Grammars(resolve_model("bundled")), dict[bool, int]()
    for learns in (False, True):
        state, seen, at, steps[learns] = grammars.start_now(message), SeenText(), 0, 0
        while at < len(ids):
            if learns:
                seen.follow(ids[:at], state)
            draft = likely_tokens(state, ids[at - 1 : at] if at else [], 7, seen if learns else None)
            right = 0
            while right < len(draft) and at + right < len(ids) and draft[right] == ids[at + right]:
                right += 1
            state.follow(step := ids[at : at + right + 1])
            at, steps[learns] = at + len(step), steps[learns] + 1
    assert steps[True] <= 0.8 * steps[False]


def test_free_text_is_not_drafted(tokenizer: Tokenizer) -> None:
    message = work_pb2.Grammar(kind=work_pb2.Grammar.KIND_REGEX, text="[a-z,:{ ]*")
    state = Grammars(resolve_model("bundled")).start_now(message)
    state.follow(ids := tokenizer.encode("so:"))
    assert likely_tokens(state, ids[-1:], 7) == []
