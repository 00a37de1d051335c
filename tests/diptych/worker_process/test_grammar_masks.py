"""Masks over whole vocabularies against a plain loop over all tokens."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import numpy as np
import pytest
import regex

from diptych.runtime.grammar.grammar import BadGrammar
from diptych.runtime.tokenizer.tokenizer import Tokenizer
from diptych.worker.v1 import work_pb2
from diptych.worker_process.grammar_masks import FRESH_TOKENS, KEPT, OWN_TABLES, Grammars, GrammarState
from tests.diptych.runtime.tokenizer.small_models import CONTROL, byte_level, sentencepiece_like, write_folder

PATTERNS = [r"[a-z ]{0,6}", r"(the|quick|qué|12)+!?", r"[😀-😃]+|(a|b)*abb", r'\{"x": ?[0-9]{1,3}\}']
ABROAD = "éü😀😃😄"
"""Characters of several bytes that a token may hold a part of."""


def message(pattern: str) -> work_pb2.Grammar:
    return work_pb2.Grammar(kind=work_pb2.Grammar.KIND_REGEX, text=pattern)


@pytest.fixture(scope="module", params=["byte_level", "byte_fallback"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = byte_level() if request.param == "byte_level" else sentencepiece_like()
    ends = [made.token_to_id("</s>"), made.token_to_id("<|im_end|>")]
    return write_folder(
        tmp_path_factory.mktemp(request.param), made, generation_config={"eos_token_id": ends}
    )


def may_begin(pattern: str, data: bytes) -> bool:
    """Whether an output that matches may begin with these bytes."""
    for cut in range(min(3, len(data)) + 1):
        head, tail = data[: len(data) - cut], data[len(data) - cut :]
        try:
            text = head.decode()
        except UnicodeDecodeError:
            continue
        if not tail:
            return regex.fullmatch(pattern, text, partial=True) is not None
        whole = [char for char in ABROAD if char.encode().startswith(tail)]
        return any(regex.fullmatch(pattern, text + char, partial=True) for char in whole)
    return False


def matches(pattern: str, data: bytes) -> bool:
    try:
        return regex.fullmatch(pattern, data.decode()) is not None
    except UnicodeDecodeError:
        return False


def allowed(state: GrammarState, size: int) -> set[int]:
    scores = np.zeros(size, dtype=np.float32)
    state.apply(scores)
    once = scores.copy()
    state.apply(scores)
    assert (once == scores).all(), "a step may be computed twice"
    return set(np.flatnonzero(scores == 0).tolist())


@pytest.mark.parametrize("pattern", PATTERNS)
def test_a_mask_allows_exactly_the_tokens_that_can_follow(folder: Path, pattern: str) -> None:
    tokenizer, grammars = Tokenizer.load(folder), Grammars(folder)
    ends = set(tokenizer.eos_token_ids)
    pieces = [tokenizer.piece(token_id) for token_id in range(tokenizer.vocab_size)]
    rng = random.Random(5)
    for _ in range(8):
        state, output = grammars.start_now(message(pattern)), b""
        while True:
            expected = {
                token_id
                for token_id, piece in enumerate(pieces)
                if piece and not tokenizer.is_special(token_id) and may_begin(pattern, output + piece)
            }
            assert state.complete == (matches(pattern, output) and not expected)
            if matches(pattern, output):
                expected |= ends
            assert allowed(state, tokenizer.vocab_size) == expected, output
            chosen = rng.choice(sorted(expected))
            if chosen in ends:
                break
            state.accept(chosen)
            output += pieces[chosen]


def test_control_tokens_and_padding_are_always_masked(folder: Path) -> None:
    tokenizer = Tokenizer.load(folder)
    state = Grammars(folder).start_now(message(r"(?s:.)*"))
    control = {tokenizer.id_of(text) for text in CONTROL} - set(tokenizer.eos_token_ids)
    padded = tokenizer.vocab_size + 5  # rows of logits may be more than the vocabulary
    found = allowed(state, padded)
    assert not found & control
    assert all(tokenizer.piece(token_id) for token_id in found)
    assert set(tokenizer.eos_token_ids) <= found
    assert max(found) < tokenizer.vocab_size
    # A user-defined token is text: clients see it, so a grammar may let it come.
    assert tokenizer.id_of("<think>") in found


def after(pattern: str, **span: object) -> work_pb2.Grammar:
    made = message(pattern)
    made.after.CopyFrom(work_pb2.ReasoningSpan(**span))  # type: ignore[arg-type]
    return made


def test_within_reasoning_all_may_come_and_after_it_what_the_grammar_allows(folder: Path) -> None:
    tokenizer, grammars = Tokenizer.load(folder), Grammars(folder)
    size, pattern = tokenizer.vocab_size, r"[0-9]{2}"
    mark, other = tokenizer.id_of("<think>"), tokenizer.encode("a")[-1]
    assert mark is not None
    grammar = after(pattern, open=True, ends=[{"ids": [mark, other]}])
    state = grammars.start_now(grammar)
    plain = allowed(grammars.start_now(message(pattern)), size)
    ids = [other, mark, mark, other]
    for count, token_id in enumerate(ids):
        assert state.dormant
        assert not state.complete
        assert allowed(state, size) == set(range(size))
        assert allowed(grammars.start_now(grammar, ids[:count]), size) == set(range(size))
        state.accept(token_id)
    for ready in (state, state.copy(), grammars.start_now(grammar, ids)):
        assert not ready.dormant
        assert allowed(ready, size) == plain
    digit = next(iter(plain))
    ahead = state.copy()
    ahead.accept(digit)
    assert allowed(ahead, size) == allowed(grammars.start_now(grammar, [*ids, digit]), size)
    assert not ahead.stuck
    # Control: one that does not know of the reasoning is stuck with it.
    assert grammars.start_now(message(pattern), ids).stuck


def test_the_first_token_opens_reasoning_or_begins_the_grammar(folder: Path) -> None:
    tokenizer, grammars = Tokenizer.load(folder), Grammars(folder)
    size, pattern = tokenizer.vocab_size, r"[0-9]{2}"
    opens, ends = tokenizer.id_of("<think>"), tokenizer.id_of("<|im_start|>")
    assert opens is not None
    assert ends is not None
    lead = tokenizer.encode("a")[-1]
    grammar = after(pattern, opens=[opens], ends=[{"ids": [ends]}], leads=[lead])
    plain = allowed(grammars.start_now(message(pattern)), size)
    state = grammars.start_now(grammar)
    assert allowed(state, size) == plain | {opens, lead}
    led = state.copy()
    led.accept(lead)
    assert not led.complete
    assert allowed(led, size) == {opens}
    led.accept(opens)
    assert led.dormant
    answers, reasons = state.copy(), state.copy()
    digit = next(iter(plain))
    answers.accept(digit)
    assert allowed(answers, size) == allowed(grammars.start_now(message(pattern), [digit]), size)
    reasons.accept(opens)
    assert reasons.dormant
    reasons.follow([digit, ends])
    assert allowed(reasons, size) == plain


def test_copies_are_independent_and_a_state_is_rebuilt_from_its_tokens(folder: Path) -> None:
    tokenizer, grammars = Tokenizer.load(folder), Grammars(folder)
    size, pattern = tokenizer.vocab_size, r"(ab|ac)[0-9]+"
    one = grammars.start_now(message(pattern))
    a, b, c, digit = (tokenizer.encode_parts(["xx" + text])[-1] for text in ("a", "b", "c", "7"))
    one.accept(a)
    other = one.copy()
    one.accept(b)
    other.accept(c)
    for state, tokens in ((one, (a, b)), (other, (a, c))):
        again = grammars.start_now(message(pattern), tokens)
        assert allowed(again, size) == allowed(state, size)
        state.accept(digit)
        assert allowed(again, size) != allowed(state, size)
        assert not state.complete
        assert not state.stuck


def test_a_forbidden_token_makes_the_state_stuck(folder: Path) -> None:
    tokenizer, grammars = Tokenizer.load(folder), Grammars(folder)
    x = tokenizer.encode_parts(["ax"])[-1]
    for state in (grammars.start_now(message("a+")), grammars.start_now(message("a+"), (x,))):
        state.accept(x)
        assert state.stuck
        assert not state.complete
        assert allowed(state, tokenizer.vocab_size) == set()
        assert state.copy().stuck


async def test_bad_grammars_raise(folder: Path, tmp_path: Path) -> None:
    grammars = Grammars(folder)
    bad = work_pb2.Grammar(kind=work_pb2.Grammar.KIND_LARK, text="start: nothing")
    with pytest.raises(BadGrammar, match="does not define"):
        await grammars.start(bad)
    with pytest.raises(BadGrammar, match="does not know"):
        await grammars.start(work_pb2.Grammar(text="a"))
    endless = write_folder(tmp_path / "endless", byte_level())
    with pytest.raises(BadGrammar, match="no end-of-sequence"):
        await Grammars(endless).start(message("a"))
    assert not (await grammars.start(message("ab"))).stuck


def test_the_most_recent_grammars_are_kept(folder: Path) -> None:
    grammars = Grammars(folder)
    for number in range(KEPT + 3):
        grammars.start_now(message(f"a{{{number + 1}}}"))
    assert len(grammars._compiled) == KEPT
    first = next(iter(grammars._compiled.values()))
    grammars.start_now(message("a{4}"))  # the oldest that is left is used again
    assert next(iter(grammars._compiled.values())) is not first


CROWDED = r"([a-z ]*q[a-z ]{20}|[a-z ]*e[a-z ]{18})*"
"""Two hundred random tokens fill the table of its lexer."""


def fill(bundled_path: Path, grammars: Grammars) -> GrammarState:
    """An output of `CROWDED` that goes on until there is no room left."""
    tokenizer, rng = Tokenizer.load(bundled_path), random.Random(1)
    letters = frozenset(b" abcdefghijklmnopqrstuvwxyz")
    fitting = [
        token_id
        for token_id in range(tokenizer.vocab_size)
        if (piece := tokenizer.piece(token_id)) and letters.issuperset(piece)
    ]
    state = grammars.start_now(message(CROWDED))
    for _ in range(400):
        state.apply(np.zeros(tokenizer.vocab_size, dtype=np.float32))
        if state.stuck:
            return state
        state.accept(rng.choice(fitting))
    raise AssertionError("there is room for 400 tokens")


def test_an_output_that_fills_the_table_does_not_stop_others(bundled_path: Path) -> None:
    grammars, tokenizer = Grammars(bundled_path), Tokenizer.load(bundled_path)
    text = tokenizer.encode_parts(["the quick brown fox"])
    running, other = (grammars.start_now(message(CROWDED), text[:2]) for _ in range(2))
    expected = allowed(grammars.start_now(message(CROWDED), text), tokenizer.vocab_size)
    hot = fill(bundled_path, grammars)
    assert allowed(hot, tokenizer.vocab_size) == set()  # who fills a table alone has no second one
    running.follow(text[2:])
    assert allowed(running, tokenizer.vocab_size) == expected
    assert allowed(running.copy(), tokenizer.vocab_size) == expected
    assert allowed(grammars.start_now(message(CROWDED), text), tokenizer.vocab_size) == expected
    other.follow(tokenizer.encode_parts(["1"]))
    assert allowed(other, tokenizer.vocab_size) == set()  # a token that the grammar forbids is none of that


def test_the_number_of_own_tables_is_bounded(bundled_path: Path) -> None:
    grammars, tokenizer = Grammars(bundled_path), Tokenizer.load(bundled_path)
    running = [grammars.start_now(message(CROWDED)) for _ in range(OWN_TABLES + 2)]
    fill(bundled_path, grammars)
    stuck = [not allowed(state, tokenizer.vocab_size) for state in running]
    assert stuck == [False] * OWN_TABLES + [True] * 2
    del running[:]
    assert not grammars._own


def test_a_grammar_in_use_is_compiled_anew_before_its_table_is_full(folder: Path) -> None:
    grammars, tokenizer = Grammars(folder), Tokenizer.load(folder)
    a = tokenizer.encode_parts(["xa"])[-1]
    states = [grammars.start_now(message("a*"), [a] * (FRESH_TOKENS // 2)) for _ in range(3)]
    assert states[0]._compiled is states[1]._compiled
    assert states[1]._compiled is not states[2]._compiled
    assert len(grammars._compiled) == 1


async def test_a_known_grammar_does_not_wait_for_a_new_one(folder: Path) -> None:
    grammars = Grammars(folder)
    known = message("a*")
    grammars.start_now(known)
    with grammars._compiling:  # as while others are compiled
        waiting = [grammars.start(message(f"b{{{number}}}")) for number in range(1, 9)]
        await asyncio.wait_for(grammars.start(known), 10)
        assert not any(task.done() for task in waiting)
    for task in waiting:
        assert not (await task).stuck
