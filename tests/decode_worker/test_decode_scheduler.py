"""The decode step's plan: the growth rule, against its own words and a simulated worker."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from decode_worker.scheduler import Candidate, StepPlan, plan_step

BLOCK = 4


def plan(
    candidates: list[Candidate], free: int, *, max_batch: int = 64, grants: int = 0, quarantined: int = 0
) -> StepPlan:
    return plan_step(
        candidates,
        free_blocks=free,
        block_size=BLOCK,
        max_batch=max_batch,
        grants=grants,
        quarantined=quarantined,
    )


def sequence(name: str, tokens: int, blocks: int, joined: int, *, reserved: bool = False) -> Candidate:
    return Candidate((name, 1), tokens, blocks, joined, reserved)


def test_everybody_runs_and_only_full_tables_grow() -> None:
    out = plan([sequence("a", 5, 2, 1), sequence("b", 9, 2, 2)], free=1)
    assert out == StepPlan((("a", 1), ("b", 1)), (("b", 1),), (), abort_newest_grant=False)


def test_the_newest_makes_room() -> None:
    out = plan([sequence("old", 9, 2, 1), sequence("new", 6, 2, 2)], free=0)
    assert out == StepPlan((), (), (("new", 1),), abort_newest_grant=False)


def test_one_victim_goes_at_a_time_for_it_may_free_less_than_it_held() -> None:
    old, mid, new = sequence("old", 9, 2, 1), sequence("mid", 9, 2, 2), sequence("new", 6, 3, 3)
    assert plan([old, mid, new], free=0).preempt == (("new", 1),)
    assert plan([old, mid], free=1).preempt == (("mid", 1),), "two of its three blocks were shared"
    assert plan([old], free=1) == StepPlan((("old", 1),), (("old", 1),), (), abort_newest_grant=False)


def test_a_reserved_sequence_is_never_the_victim() -> None:
    out = plan(
        [sequence("old", 9, 2, 1), sequence("mid", 6, 2, 2), sequence("new", 6, 9, 3, reserved=True)], free=0
    )
    assert out.preempt == (("mid", 1),)
    out = plan([sequence("old", 9, 2, 1), sequence("new", 6, 9, 3, reserved=True)], free=2)
    assert out.run == (("old", 1), ("new", 1))


def test_the_oldest_alone_calls_a_grant_back_and_waits() -> None:
    out = plan([sequence("only", 9, 2, 1)], free=0, grants=2)
    assert out == StepPlan((), (), (), abort_newest_grant=True)


def test_blocks_on_their_way_back_are_waited_for() -> None:
    out = plan([sequence("only", 9, 2, 1)], free=0, grants=2, quarantined=1)
    assert out == StepPlan((), (), (), abort_newest_grant=False)


def test_nothing_to_wait_for_goes_back_to_the_gateway() -> None:
    out = plan([sequence("only", 9, 2, 1)], free=0)
    assert out == StepPlan((), (), (("only", 1),), abort_newest_grant=False)


def test_beyond_the_batch_sequences_wait_and_are_the_first_victims() -> None:
    out = plan([sequence("a", 9, 2, 1), sequence("b", 5, 2, 2), sequence("c", 5, 2, 3)], free=0, max_batch=2)
    assert out.preempt == (("c", 1),)
    assert plan([sequence("a", 9, 2, 1), sequence("b", 5, 2, 2)], free=2).run == (("a", 1), ("b", 1))


@given(
    st.lists(st.tuples(st.integers(1, 40), st.integers(0, 2), st.booleans()), max_size=12),
    st.integers(0, 6),
    st.integers(1, 8),
    st.integers(0, 3),
    st.integers(0, 3),
)
def test_a_plan_can_always_be_carried_out(
    shapes: list[tuple[int, int, bool]], free: int, max_batch: int, grants: int, quarantined: int
) -> None:
    candidates = []
    for order, (tokens, spare, reserved) in enumerate(shapes):
        blocks = (tokens - 1) // BLOCK + (1 if reserved else 0) + spare  # at most one block is missing
        candidates.append(
            sequence(
                str(order),
                tokens,
                max(blocks, -(-tokens // BLOCK) - 1),
                order,
                reserved=reserved,
            )
        )
    out = plan(candidates, free, max_batch=max_batch, grants=grants, quarantined=quarantined)
    by_key = {c.key: c for c in candidates}
    assert len(out.run) <= max_batch
    assert set(out.grow) <= set(out.run)
    assert not set(out.preempt) & set(out.run)
    assert len(out.grow) <= free
    for key in out.run:
        room = by_key[key].blocks + (key in out.grow)
        assert room * BLOCK >= by_key[key].tokens
    oldest_first = [by_key[key].joined for key in out.run]
    assert oldest_first == sorted(oldest_first)


def test_every_sequence_finishes_in_a_pool_that_holds_the_largest() -> None:
    """Brute force over seeds: preempted sequences come back with their tokens; nothing deadlocks."""
    for seed in range(200):
        rng = random.Random(seed)
        todo = {f"{i}": (rng.randint(1, 20), rng.randint(1, 20)) for i in range(10)}  # prompt, output
        total = max(-(-(prompt + output) // BLOCK) for prompt, output in todo.values())
        running: dict[str, Candidate] = {}
        tokens = {name: prompt + 1 for name, (prompt, _) in todo.items()}
        waiting, finished = list(todo), []
        for clock in range(5000):
            held = sum(c.blocks for c in running.values())
            while waiting and (need := -(-(tokens[waiting[0]] - 1) // BLOCK)) + len(running) <= total - held:
                name = waiting.pop(0)
                running[name] = Candidate((name, 1), tokens[name], need, clock)
                held += need
            while True:
                held = sum(c.blocks for c in running.values())
                out = plan(list(running.values()), total - held, max_batch=4)
                for name, _ in out.preempt:
                    tokens[name] = running.pop(name).tokens
                    waiting.append(name)
                if out.run or not out.preempt:
                    break
            for name, _ in out.run:
                c = running[name]
                blocks = c.blocks + ((name, 1) in out.grow)
                assert blocks * BLOCK >= c.tokens
                running[name] = Candidate(c.key, c.tokens + 1, blocks, c.joined)
                if running[name].tokens - todo[name][0] > todo[name][1]:
                    del running[name]
                    finished.append(name)
            assert sum(c.blocks for c in running.values()) <= total
            if len(finished) == len(todo):
                break
        assert sorted(finished) == sorted(todo), f"seed {seed}"
