"""The child that compiles grammars first: what it answers, and that it may be lost."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator

import pytest

from gateway.request.grammar_check import GrammarCheck
from runtime.grammar.grammar import BadGrammar, Grammar, Kind

# Deciding whether thirty patterns have a text in common takes llguidance hours.
ENDLESS = json.dumps({"allOf": [{"type": "string", "pattern": f"a{{{n}}}.*b"} for n in range(1, 30)]})


@pytest.fixture
async def checker() -> AsyncIterator[GrammarCheck]:
    checker = GrammarCheck()
    yield checker
    await checker.close()


async def test_good_and_bad(checker: GrammarCheck) -> None:
    await checker.check(Grammar(Kind.REGEX, "[a-z]+"))
    with pytest.raises(BadGrammar, match="is not valid"):
        await checker.check(Grammar(Kind.REGEX, "["))
    with pytest.raises(BadGrammar, match="is not valid"):  # from memory
        await checker.check(Grammar(Kind.REGEX, "["))


async def test_what_never_ends_is_refused_and_delays_nobody_for_long(checker: GrammarCheck) -> None:
    await checker.check(Grammar(Kind.REGEX, "a"))
    first = checker._child
    begun = time.monotonic()
    with pytest.raises(BadGrammar, match="too complex"):
        await checker.check(Grammar(Kind.JSON_SCHEMA, ENDLESS))
    await checker.check(Grammar(Kind.REGEX, "b"))
    assert checker._child is not first
    assert first is not None
    assert first.process.returncode is not None
    assert time.monotonic() - begun < 20  # of which half a second is the child's processor time


async def test_a_child_that_died_between_two_questions_refuses_nothing(checker: GrammarCheck) -> None:
    await checker.check(Grammar(Kind.REGEX, "a"))
    first = checker._child
    assert first is not None
    first.process.kill()
    first.process.wait()
    await checker.check(Grammar(Kind.REGEX, "b"))
    assert checker._child is not first


async def test_many_at_a_time_get_their_own_answers(checker: GrammarCheck) -> None:
    async def good(number: int) -> bool:
        try:
            await checker.check(Grammar(Kind.REGEX, ("a" if number % 3 else "(") * (number + 1)))
        except BadGrammar:
            return False
        return True

    answers = await asyncio.gather(*map(good, range(30)))
    assert answers == [bool(number % 3) for number in range(30)]


async def test_a_caller_that_leaves_takes_no_answer_of_another(checker: GrammarCheck) -> None:
    await checker.check(Grammar(Kind.REGEX, "a"))
    leaving = asyncio.create_task(checker.check(Grammar(Kind.JSON_SCHEMA, ENDLESS)))
    await asyncio.sleep(0.05)
    leaving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await leaving
    await checker.check(Grammar(Kind.REGEX, "fine"))
    with pytest.raises(BadGrammar):
        await checker.check(Grammar(Kind.REGEX, "("))
