"""The prefill step's plan: budget, order, late asks."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from prefill_worker.scheduler import Chunk, Prompt, plan_asks, plan_chunks


def prompt(name: str, tokens: int, arrived: int, *, decode: str = "d1", priority: int = 0) -> Prompt:
    return Prompt((name, 1), tokens, decode, priority, arrived)


def test_a_step_mixes_prompts_up_to_the_budget() -> None:
    chunks = plan_chunks([prompt("a", 5, 1), prompt("b", 9, 2), prompt("c", 3, 3)], budget=10, enough=10)
    assert chunks == [Chunk(("a", 1), 5, last=True), Chunk(("b", 1), 5, last=False)]


def test_priority_goes_before_arrival() -> None:
    chunks = plan_chunks([prompt("early", 5, 1), prompt("urgent", 5, 2, priority=3)], budget=6, enough=6)
    assert [chunk.key[0] for chunk in chunks] == ["urgent", "early"]


def test_later_prompts_do_not_lengthen_a_full_step() -> None:
    waiting = [prompt("a", 128, 1), prompt("b", 128, 2), prompt("c", 128, 3)]
    assert [chunk.key[0] for chunk in plan_chunks(waiting, 512, 192)] == ["a", "b"]
    assert [chunk.key[0] for chunk in plan_chunks(waiting, 512, 100)] == ["a"]
    assert plan_chunks([prompt("long", 900, 1)], 512, 192) == [Chunk(("long", 1), 512, last=False)]


prompts = st.lists(st.tuples(st.integers(1, 50), st.integers(-2, 2)), max_size=10).map(
    lambda shapes: [
        prompt(str(i), tokens, i, priority=priority) for i, (tokens, priority) in enumerate(shapes)
    ]
)


@given(prompts, st.integers(1, 40))
def test_the_budget_is_used_and_never_exceeded(granted: list[Prompt], budget: int) -> None:
    chunks = plan_chunks(granted, budget, budget)
    total = sum(prompt.tokens for prompt in granted)
    assert sum(chunk.tokens for chunk in chunks) == min(budget, total)
    tokens = {prompt.key: prompt.tokens for prompt in granted}
    assert all(0 < chunk.tokens <= tokens[chunk.key] for chunk in chunks)
    assert all(chunk.last == (chunk.tokens == tokens[chunk.key]) for chunk in chunks)
    assert all(chunk.last for chunk in chunks[:-1])


@given(prompts, st.integers(1, 40), st.integers(1, 60))
def test_a_step_takes_prompts_until_it_has_enough_tokens(
    granted: list[Prompt], budget: int, enough: int
) -> None:
    *before, last = [chunk.tokens for chunk in plan_chunks(granted, budget, enough)] or [0]
    assert sum(before) < enough
    assert sum(before) + last <= budget
    assert sum(before) + last >= min(enough, budget, sum(prompt.tokens for prompt in granted))


@given(prompts, st.integers(1, 60), st.integers(1, 60))
def test_repeated_steps_compute_every_token_once(granted: list[Prompt], budget: int, enough: int) -> None:
    left = {prompt.key: prompt for prompt in granted}
    computed = dict.fromkeys(left, 0)
    while left:
        for chunk in plan_chunks(list(left.values()), budget, enough):
            computed[chunk.key] += chunk.tokens
            old = left.pop(chunk.key)
            if not chunk.last:
                left[chunk.key] = Prompt(
                    old.key, old.tokens - chunk.tokens, old.decode, old.priority, old.arrived
                )
    assert computed == {prompt.key: prompt.tokens for prompt in granted}


def test_prompts_ask_for_grants_late() -> None:
    queued = [prompt(str(i), 100, i) for i in range(10)]
    assert plan_asks(queued, [], [], lookahead=250, max_prompts=32) == [("0", 1), ("1", 1), ("2", 1)]
    assert plan_asks(queued[3:], queued[:3], [], lookahead=250, max_prompts=32) == []
    assert plan_asks(queued[3:], [], queued[:2], lookahead=250, max_prompts=32) == [("3", 1)]


def test_a_full_decode_worker_does_not_hold_up_another() -> None:
    asked = [prompt("stuck", 500, 1, decode="full")]
    queued = [prompt("behind", 10, 2, decode="full"), prompt("free", 10, 3, decode="idle")]
    assert plan_asks(queued, asked, [], lookahead=250, max_prompts=32) == [("free", 1)]


def test_small_prompts_for_a_full_decode_worker_do_not_hold_up_another() -> None:
    asked = [prompt(f"stuck {i}", 10, i, decode="full") for i in range(32)]
    queued = [prompt("behind", 10, 99, decode="full"), prompt("free", 10, 100, decode="idle")]
    assert plan_asks(queued, asked, [], lookahead=1024, max_prompts=32) == [("free", 1)]
    computing = [prompt(f"computing {i}", 10, i, decode="idle") for i in range(32)]
    assert plan_asks(queued, asked, computing, lookahead=1024, max_prompts=32) == []


def test_a_higher_priority_asks_past_those_that_wait() -> None:
    asked = [prompt("batch", 8000, 1), prompt("also", 10, 2, priority=5)]
    queued = [prompt("urgent", 10, 3, priority=9), prompt("next", 300, 4, priority=5), prompt("low", 10, 5)]
    assert plan_asks(queued, asked, [], lookahead=250, max_prompts=32) == [("urgent", 1), ("next", 1)]
    computing = [prompt("computing", 250, 0)]
    assert plan_asks(queued, asked, computing, lookahead=250, max_prompts=32) == []


def test_the_number_of_prompts_is_bounded() -> None:
    queued = [prompt(str(i), 1, i) for i in range(10)]
    assert len(plan_asks(queued, [prompt("x", 1, 0)], [prompt("y", 1, 0)], lookahead=99, max_prompts=5)) == 3


@given(prompts, st.integers(1, 40), st.integers(1, 20))
def test_a_limited_chunk_leaves_room_for_others(granted: list[Prompt], budget: int, limit: int) -> None:
    chunks = plan_chunks([replace(prompt, chunk_limit=limit) for prompt in granted], budget, budget)
    assert all(chunk.tokens <= limit for chunk in chunks)
    assert sum(chunk.tokens for chunk in chunks) == min(budget, sum(min(p.tokens, limit) for p in granted))


def with_image(begin: int, end: int, tokens: int = 100, name: str = "p") -> Prompt:
    return Prompt((name, 1), tokens, "d", 0, 0, unbroken=((begin, end),))


def test_no_chunk_ends_within_an_image_whose_rows_see_one_another() -> None:
    def first(prompt: Prompt, budget: int) -> int:
        [chunk] = plan_chunks([prompt], budget, budget)
        return chunk.tokens

    assert first(with_image(10, 40), 64) == 64
    assert first(with_image(10, 40), 40) == 40
    assert first(with_image(10, 40), 39) == 10
    assert first(with_image(10, 40), 10) == 10
    assert first(with_image(0, 40), 16) == 40  # whole, beyond the budget
    assert first(with_image(-5, 40), 16) == 40  # its first rows are cached
    assert first(with_image(-40, 0), 16) == 16


def test_an_image_that_does_not_fit_beside_others_waits_for_the_next_step() -> None:
    text = Prompt(("t", 1), 10, "d", 0, 0)
    assert [chunk.key for chunk in plan_chunks([text, with_image(0, 40)], 32, 32)] == [("t", 1)]
    both = plan_chunks([text, with_image(5, 40)], 32, 32)
    assert [(chunk.key[0], chunk.tokens) for chunk in both] == [("t", 10), ("p", 5)]
