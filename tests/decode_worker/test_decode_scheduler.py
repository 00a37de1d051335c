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
        candidates, free_blocks=free, max_batch=max_batch, grants=grants, quarantined=quarantined
    )


def in_line(candidate: Candidate) -> tuple[int, int]:
    return -candidate.priority, candidate.arrival_order


def test_all_candidates_run_and_only_full_block_tables_grow() -> None:
    out = plan([Candidate(1), Candidate(2, growth=1)], free=1)
    assert out == StepPlan((1, 2), (2,), (), abort_newest_grant=False)


def test_the_newest_is_preempted() -> None:
    out = plan([Candidate(1, growth=1), Candidate(2)], free=0)
    assert out == StepPlan((), (), (2,), abort_newest_grant=False)


def test_priority_goes_before_arrival_order() -> None:
    old, urgent = Candidate(1, growth=1), Candidate(2, growth=1, priority=5)
    assert plan([old, urgent], free=1).preempt == (1,)
    assert plan([old, urgent], free=2).run == (2, 1)
    assert plan([old, urgent], free=2, max_batch=1).run == (2,)
    assert plan([old, Candidate(2, priority=-1), Candidate(3)], free=0).preempt == (2,)


def test_one_victim_is_preempted_at_a_time() -> None:
    old, mid, new = Candidate(1, growth=1), Candidate(2, growth=1), Candidate(3)
    assert plan([old, mid, new], free=0).preempt == (3,)
    assert plan([old, mid], free=1).preempt == (2,), "two of its three blocks were shared"
    assert plan([old], free=1) == StepPlan((1,), (1,), (), abort_newest_grant=False)


def test_a_reserved_sequence_is_never_preempted_and_grows_on_its_reserve() -> None:
    out = plan([Candidate(1, growth=1), Candidate(2), Candidate(3, reserved=True)], free=0)
    assert out.preempt == (2,)
    out = plan([Candidate(1, growth=1), Candidate(3, reserved=True)], free=2)
    assert (out.run, out.grow) == ((1, 3), (1, 3))


def test_the_first_in_line_aborts_a_grant_and_waits() -> None:
    out = plan([Candidate(1, growth=1)], free=0, grants=2)
    assert out == StepPlan((), (), (), abort_newest_grant=True)


def test_quarantined_blocks_are_waited_for() -> None:
    waiting = StepPlan((), (), (), abort_newest_grant=False)
    assert plan([Candidate(1, growth=1)], free=0, grants=2, quarantined=1) == waiting
    assert plan([Candidate(1, rows=4, growth=4)], free=1, grants=2, quarantined=3) == waiting
    assert plan([Candidate(1, rows=4, growth=4)], free=1, grants=2, quarantined=2).abort_newest_grant


def test_a_starving_group_without_grants_is_preempted() -> None:
    assert plan([Candidate(1, growth=1)], free=0) == StepPlan((), (), (1,), abort_newest_grant=False)


def test_sequences_beyond_the_batch_wait_and_are_preempted_first() -> None:
    out = plan([Candidate(1, growth=1), Candidate(2), Candidate(3)], free=0, max_batch=2)
    assert out.preempt == (3,)
    assert plan([Candidate(1, growth=1), Candidate(2)], free=2).run == (1, 2)


def test_all_writers_to_a_shared_block_but_the_last_need_copies() -> None:
    forks = [Candidate(n, shared=(7, 3)) for n in (1, 2, 3)]
    assert plan(forks, free=2) == StepPlan((1, 2, 3), (1, 2), (), abort_newest_grant=False)
    assert plan(forks, free=1).preempt == (3,), "then the block has two holders, and one copy is enough"
    assert plan(forks[:2], free=1).preempt == (2,), "a sequence that is not planned holds it too"
    assert plan([Candidate(n, shared=(7, 2)) for n in (1, 2)], free=1).run == (1, 2)


def test_a_step_group_that_does_not_fit_waits_and_lets_later_ones_pass() -> None:
    beams = Candidate(2, rows=4)
    assert plan([Candidate(1), beams, Candidate(3), Candidate(4)], free=0, max_batch=4).run == (1, 3, 4)
    assert plan([beams, Candidate(3), Candidate(4)], free=0, max_batch=5).run == (2, 3)
    assert plan([Candidate(1), beams], free=0, max_batch=3).run == (1,)
    assert plan([beams, Candidate(3)], free=0, max_batch=3).run == (2,), "the oldest goes whatever its size"


def test_a_step_group_gets_all_its_blocks_or_is_preempted_as_a_whole() -> None:
    beams = Candidate(2, rows=4, growth=3)
    assert plan([Candidate(1), beams], free=2).preempt == (2,)
    assert plan([Candidate(1), beams], free=3) == StepPlan((1, 2), (2,), (), abort_newest_grant=False)


@st.composite
def groups(draw: st.DrawFn) -> list[Candidate]:
    made: list[Candidate] = []
    holders = {block: draw(st.integers(2, 5)) for block in range(3)}
    room = dict(holders)
    for arrival_order in range(draw(st.integers(0, 12))):
        rows = draw(st.integers(1, 5))
        reserved = draw(st.booleans())
        block = draw(st.sampled_from([None, 0, 1, 2]))
        if rows > 1 or reserved or block is None or not room[block]:
            growth = 0 if reserved else draw(st.integers(0, rows))
            priority = draw(st.integers(-1, 1))
            made.append(Candidate(arrival_order, rows, growth, None, reserved, priority))
        else:
            room[block] -= 1
            made.append(Candidate(arrival_order, shared=(block, holders[block])))
    return made


@given(groups(), st.integers(0, 8), st.integers(1, 8), st.integers(0, 3), st.integers(0, 3))
def test_a_plan_can_always_be_carried_out(
    candidates: list[Candidate], free: int, max_batch: int, grants: int, quarantined: int
) -> None:
    out = plan(candidates, free, max_batch=max_batch, grants=grants, quarantined=quarantined)
    by_age = {c.arrival_order: c for c in candidates}
    running = [by_age[arrival_order] for arrival_order in out.run]
    assert sum(c.rows for c in running) <= max_batch or len(running) == 1
    assert set(out.grow) <= set(out.run)
    assert not set(out.preempt) & set(out.run)
    line = sorted(candidates, key=in_line)
    assert list(out.run) == [one.arrival_order for one in line if one.arrival_order in out.run]
    held = {c.shared[0]: c.shared[1] for c in candidates if c.shared}
    for candidate in running:  # serve them in order, as the worker does
        free -= candidate.growth
        if candidate.shared and held[candidate.shared[0]] > 1:
            held[candidate.shared[0]] -= 1
            free -= 1
            assert candidate.arrival_order in out.grow
        assert not candidate.growth or candidate.arrival_order in out.grow
    assert free >= 0
    if candidates and not out.run:
        assert out.preempt or out.abort_newest_grant or quarantined


@given(groups(), st.integers(0, 8), st.integers(1, 8))
def test_repeated_preemption_ends_with_a_running_group(
    candidates: list[Candidate], free: int, max_batch: int
) -> None:
    """A victim frees what its rows hold at least; the first in line is the last to go."""
    alive = {c.arrival_order: c for c in sorted(candidates, key=in_line)}
    while alive:
        out = plan(list(alive.values()), free, max_batch=max_batch)
        if out.run:
            break
        (victim,) = out.preempt
        first, *_ = alive
        assert victim == first or victim == [j for j, c in alive.items() if not c.reserved][-1]
        free += alive.pop(victim).rows


class Worker:
    """Prompts of several choices in a pool: blocks by number, who holds them, copies on write."""

    def __init__(self, total: int) -> None:
        self.holders: dict[int, int] = {}
        self.total = total
        self.numbers = 0
        self.tables: dict[int, list[int]] = {}
        self.tokens: dict[int, int] = {}  # prompt and output, the last one's KV not computed yet

    @property
    def free(self) -> int:
        return self.total - len(self.holders)

    def new(self) -> int:
        self.numbers += 1
        self.holders[self.numbers] = 1
        return self.numbers

    def drop(self, block: int) -> None:
        self.holders[block] -= 1
        if not self.holders[block]:
            del self.holders[block]

    def join(self, ages: list[int], tokens: int) -> None:
        table = [self.new() for _ in range(-(-(tokens - 1) // BLOCK))]
        for age in ages:
            self.tables[age], self.tokens[age] = list(table), tokens
            for block in table:
                self.holders[block] += 1
        for block in table:
            self.drop(block)

    def leave(self, age: int) -> int:
        for block in self.tables.pop(age):
            self.drop(block)
        return self.tokens.pop(age)

    def candidate(self, age: int) -> Candidate:
        place = (self.tokens[age] - 1) // BLOCK
        if place >= len(self.tables[age]):
            return Candidate(age, growth=1)
        block = self.tables[age][place]
        return Candidate(age, shared=(block, self.holders[block]) if self.holders[block] > 1 else None)

    def step(self, age: int) -> None:
        place, table = (self.tokens[age] - 1) // BLOCK, self.tables[age]
        if place >= len(table):
            table.append(self.new())
        elif self.holders[table[place]] > 1:
            self.drop(table[place])
            table[place] = self.new()
        assert len(self.holders) <= self.total
        assert self.holders[table[place]] == 1, "two sequences write to one block"
        self.tokens[age] += 1


def test_every_choice_finishes_in_a_pool_that_holds_the_largest() -> None:
    """Brute force over seeds: preempted choices come back alone with their tokens; nothing deadlocks."""
    for seed in range(200):
        rng = random.Random(seed)
        # prompt, output, choices
        todo = {n: (rng.randint(1, 20), rng.randint(1, 20), rng.randint(1, 4)) for n in range(8)}
        worker = Worker(max(-(-(prompt + output) // BLOCK) for prompt, output, _ in todo.values()) + 1)
        waiting = [(n, prompt + 1, choices) for n, (prompt, _, choices) in todo.items()]
        owner: dict[int, int] = {}
        age, finished = 0, 0
        for _ in range(20000):
            while waiting:
                n, tokens, choices = waiting[0]
                if -(-(tokens - 1) // BLOCK) + len(worker.tables) > worker.free:
                    break
                waiting.pop(0)
                ages = list(range(age, age + choices))
                age += choices
                worker.join(ages, tokens)
                owner.update(dict.fromkeys(ages, n))
            while True:
                out = plan([worker.candidate(a) for a in worker.tables], worker.free, max_batch=4)
                for victim in out.preempt:
                    waiting.append((owner[victim], worker.leave(victim), 1))
                if out.run or not out.preempt:
                    break
            for running in out.run:
                worker.step(running)
                prompt, output, _ = todo[owner[running]]
                if worker.tokens[running] - prompt > output:
                    worker.leave(running)
                    finished += 1
            if not waiting and not worker.tables:
                break
        assert finished == sum(choices for _, _, choices in todo.values()), f"seed {seed}"
        assert not worker.holders
