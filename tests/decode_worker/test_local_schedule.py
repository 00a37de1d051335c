"""Schedule of prompts that a decode worker computes itself."""

from __future__ import annotations

from decode_worker.local_schedule import LEAST_CHUNK, ChunkBudget, QueuedPrompt, plan_asks, plan_chunks


def test_asks_stop_at_the_lookahead() -> None:
    queued = [QueuedPrompt(n, 10) for n in range(4)]
    assert plan_asks(queued, [], 25) == [0, 1, 2]
    assert plan_asks(queued, [QueuedPrompt(9, 20)], 25) == [0]
    assert plan_asks(queued, [QueuedPrompt(9, 30)], 25) == []


def test_higher_priority_goes_first() -> None:
    queued = [QueuedPrompt(1, 10), QueuedPrompt(2, 10, priority=1)]
    assert plan_asks(queued, [], 5) == [2]
    assert plan_chunks(queued, 15) == [(2, 10), (1, 5)]


def test_step_is_filled_up_to_its_budget() -> None:
    prompts = [QueuedPrompt(1, 3), QueuedPrompt(2, 40, chunk_limit=4), QueuedPrompt(3, 40)]
    assert plan_chunks(prompts, 16) == [(1, 3), (2, 4), (3, 9)]
    assert plan_chunks(prompts, 2) == [(1, 2)]
    assert plan_chunks([], 16) == []


def test_budget_is_whole_before_times_are_known() -> None:
    assert ChunkBudget(16).tokens(0.0) == 16


def test_step_with_a_chunk_is_twice_as_long_at_most() -> None:
    budget = ChunkBudget(64)
    budget.record(0.010, 0)
    budget.record(0.026, 32)  # half a millisecond a token
    assert budget.tokens(0.0) == 20


def test_pauses_make_room_for_chunks() -> None:
    budget = ChunkBudget(64)
    budget.record(0.010, 0)
    budget.record(0.026, 32)
    assert budget.tokens(0.030) == 60
    assert budget.tokens(0.100) == 64


def test_slow_chunks_shrink_but_end() -> None:
    budget = ChunkBudget(64)
    budget.record(0.010, 0)
    budget.record(0.500, 16)
    assert budget.tokens(0.0) == LEAST_CHUNK
    assert ChunkBudget(2).tokens(0.0) == 2


def test_step_of_chunks_alone_has_no_share_of_sequences() -> None:
    budget = ChunkBudget(64)
    budget.record(0.010, 0)
    budget.record(0.016, 32, alone=True)
    assert budget.tokens(0.0) == 20
