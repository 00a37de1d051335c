"""The child that compiles grammars first: what it answers, and that it may be lost."""

from __future__ import annotations

import asyncio
import json
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from diptych.runtime.errors import Draining, GrammarNotChecked, InvalidParameter, QueueFull
from diptych.runtime.grammar.grammar import BadGrammar, Grammar, Kind
from gateway.request.grammar_check import MAX_WAITING, GrammarCheck
from gateway.request.structured_output import Constraint

ROOT = Path(__file__).parents[3]

# Deciding whether thirty patterns have a text in common takes llguidance hours.
ENDLESS = json.dumps({"allOf": [{"type": "string", "pattern": f"a{{{n}}}.*b"} for n in range(1, 30)]})


@pytest.fixture
async def checker() -> AsyncIterator[GrammarCheck]:
    checker = GrammarCheck()
    yield checker
    await checker.close()


async def test_good_and_bad_grammars_are_told_apart(checker: GrammarCheck) -> None:
    await checker.check(Grammar(Kind.REGEX, "[a-z]+"))
    with pytest.raises(BadGrammar, match="is not valid"):
        await checker.check(Grammar(Kind.REGEX, "["))
    with pytest.raises(BadGrammar, match="is not valid"):  # from memory
        await checker.check(Grammar(Kind.REGEX, "["))


async def test_control_tokens_of_the_model_are_no_fault(checker: GrammarCheck) -> None:
    """The child's vocabulary is single bytes: which tokens a model has is not its question."""
    await checker.check(Grammar(Kind.LARK, 'start: <[200005]> "final" <[200008]>'))
    with pytest.raises(BadGrammar):
        await checker.check(Grammar(Kind.LARK, "start: <[200005]> missing"))


async def test_a_folder_called_like_our_package_is_not_run(
    checker: GrammarCheck, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "diptych" / "runtime").mkdir(parents=True)
    (tmp_path / "diptych" / "__init__.py").write_text("raise SystemExit('another package')")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.chdir(tmp_path)
    await checker.check(Grammar(Kind.REGEX, "[a-z]+"))


async def test_endless_grammar_is_refused_and_delays_others_little(checker: GrammarCheck) -> None:
    await checker.check(Grammar(Kind.REGEX, "a"))
    first = checker.child.process
    begun = time.monotonic()
    with pytest.raises(BadGrammar, match="too complex"):
        await checker.check(Grammar(Kind.JSON_SCHEMA, ENDLESS))
    await checker.check(Grammar(Kind.REGEX, "b"))
    assert checker.child.process is not first
    assert first is not None
    assert first.returncode == -signal.SIGPROF
    assert time.monotonic() - begun < 20  # of which half a second is the child's processor time


async def test_a_child_that_died_between_two_questions_refuses_nothing(checker: GrammarCheck) -> None:
    await checker.check(Grammar(Kind.REGEX, "a"))
    first = checker.child.process
    assert first is not None
    first.kill()
    first.wait()
    await checker.check(Grammar(Kind.REGEX, "b"))
    assert checker.child.process is not first


async def killed(checker: GrammarCheck, other_than: object = None) -> object:
    """Kill the next child before it has said anything: it takes a while to start."""
    while (child := checker.child.process) is None or child is other_than:  # noqa: ASYNC110
        await asyncio.sleep(0.001)
    child.kill()
    return child


async def test_a_death_that_is_not_the_grammars_fault_is_not_held_against_it(checker: GrammarCheck) -> None:
    """As of an operator's hand, or of a kernel that is short of memory."""
    good = Grammar(Kind.REGEX, "[a-z]+")
    asking = asyncio.create_task(checker.check(good))
    await killed(checker)
    await asking  # the next child
    other = Grammar(Kind.REGEX, "[0-9]+")
    await checker.child.end()
    asking = asyncio.create_task(checker.check(other))
    first = await killed(checker)
    await killed(checker, other_than=first)
    with pytest.raises(GrammarNotChecked):
        await asking
    await checker.check(other)


async def test_a_grammar_is_compiled_once_for_all_that_wait_for_it(
    checker: GrammarCheck, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = counted(checker, monkeypatch)
    same = Grammar(Kind.REGEX, "[a-z]+")
    await asyncio.gather(*(checker.check(same, tenant) for tenant in "ab" for _ in range(20)))
    assert asked == [same]
    bad = Grammar(Kind.JSON_SCHEMA, ENDLESS)
    results = await asyncio.gather(*(checker.check(bad) for _ in range(20)), return_exceptions=True)
    assert [type(result) for result in results] == [BadGrammar] * 20
    assert asked == [same, bad]


def counted(checker: GrammarCheck, monkeypatch: pytest.MonkeyPatch) -> list[Grammar]:
    """What the child is asked from now on."""
    asked: list[Grammar] = []
    ask = checker.child.ask

    async def ask_counted(grammar: Grammar) -> str:
        asked.append(grammar)
        return await ask(grammar)

    monkeypatch.setattr(checker.child, "ask", ask_counted)
    return asked


def endless(number: int) -> Grammar:
    return Grammar(Kind.JSON_SCHEMA, ENDLESS.replace("*b", f"*b{number}"))


@asynccontextmanager
async def flood(
    checker: GrammarCheck, monkeypatch: pytest.MonkeyPatch, grammars: int
) -> AsyncIterator[list[Grammar]]:
    """What the child is asked while one tenant waits for so many slow grammars."""
    await checker.check(Grammar(Kind.REGEX, "a"))
    asked = counted(checker, monkeypatch)
    slow = [asyncio.create_task(checker.check(endless(number), "flood")) for number in range(grammars)]
    await asyncio.sleep(0)
    try:
        yield asked
    finally:
        for task in slow:
            task.cancel()
        await asyncio.gather(*slow, return_exceptions=True)


async def test_a_tenant_waits_for_one_grammar_of_each_other_tenant(
    checker: GrammarCheck, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with flood(checker, monkeypatch, 8) as asked:
        await asyncio.gather(*(checker.check(Grammar(Kind.REGEX, letter), "calm") for letter in "xy"))
        assert [grammar.text for grammar in asked[1:3]] == ["x", "y"]
    await checker.check(Grammar(Kind.REGEX, "z"), "flood")  # a grammar that no request waits for is left out
    assert len(asked) == 5


async def test_the_tools_of_a_request_wait_for_one_turn_together(
    checker: GrammarCheck, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with flood(checker, monkeypatch, 4) as asked:
        tools = [(f"tools[{number}]", Grammar(Kind.REGEX, f"b{number}")) for number in range(20)]
        await Constraint("tools", Grammar(Kind.REGEX, "c"), tuple(tools)).verify(checker, "calm")
        # 21 of them, if each had a turn
        assert sum(grammar.kind is Kind.JSON_SCHEMA for grammar in asked) <= 3


async def test_the_first_fault_leaves_out_the_rest(
    checker: GrammarCheck, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = counted(checker, monkeypatch)
    bad = [(f"tools[{number}]", endless(number)) for number in range(20)]
    with pytest.raises(InvalidParameter, match=r"^tools\[0\]: "):
        await Constraint("tools", Grammar(Kind.REGEX, "c"), tuple(bad)).verify(checker, "flood")
    await checker.check(Grammar(Kind.REGEX, "a"), "flood")
    assert len(asked) <= 3


async def test_a_tenant_may_have_so_many_grammars_waiting(checker: GrammarCheck) -> None:
    waiting = [
        asyncio.create_task(checker.check(Grammar(Kind.REGEX, f"a{number}"), "flood"))
        for number in range(MAX_WAITING)
    ]
    await asyncio.sleep(0)
    with pytest.raises(QueueFull) as refused:
        await checker.check(Grammar(Kind.REGEX, "one more"), "flood")
    assert refused.value.retry_after_s
    await checker.check(Grammar(Kind.REGEX, "a0"), "flood")  # that waits already
    await checker.check(Grammar(Kind.REGEX, "one more"), "calm")
    await asyncio.gather(*waiting)
    await checker.check(Grammar(Kind.REGEX, "another one"), "flood")


async def test_many_at_a_time_get_their_own_answers(checker: GrammarCheck) -> None:
    async def good(number: int) -> bool:
        try:
            await checker.check(Grammar(Kind.REGEX, ("a" if number % 3 else "(") * (number + 1)))
        except BadGrammar:
            return False
        return True

    answers = await asyncio.gather(*map(good, range(30)))
    assert answers == [bool(number % 3) for number in range(30)]


async def test_a_caller_that_leaves_keeps_the_child_and_takes_no_answer_of_another(
    checker: GrammarCheck,
) -> None:
    await checker.check(Grammar(Kind.REGEX, "a"))
    child = checker.child.process
    hard = Grammar(Kind.JSON_SCHEMA, json.dumps({"enum": [str(number) for number in range(8000)]}))
    leaving = asyncio.create_task(checker.check(hard))
    await asyncio.sleep(0.005)
    leaving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await leaving
    await checker.check(Grammar(Kind.REGEX, "fine"))
    with pytest.raises(BadGrammar):
        await checker.check(Grammar(Kind.REGEX, "("))
    assert checker.child.process is child


async def test_close_ends_waiting_requests_with_draining() -> None:
    checker = GrammarCheck()
    asked = [Grammar(Kind.JSON_SCHEMA, ENDLESS), Grammar(Kind.REGEX, "a")]
    waiting = [asyncio.create_task(checker.check(grammar)) for grammar in asked]
    await asyncio.sleep(0.1)
    await checker.close()
    for late in (*waiting, checker.check(asked[1])):
        with pytest.raises(Draining):
            await late
