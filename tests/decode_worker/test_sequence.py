"""Shared prefixes, copies on write and reserves: every sequence reads back what it wrote."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from decode_worker.max_blocks import max_blocks
from decode_worker.prefix_publisher import PrefixPublisher
from decode_worker.sequence import AttemptBlocks, DecodeSequence
from diptych.engine.kv.block_pool import BlockPool
from diptych.engine.kv.kv_memory import KVLayout, KVMemory
from diptych.worker_process.attempt import Attempt
from tests.diptych.worker_process.scripted_gateway import work

SIZE = 4
TOTAL = 24


@dataclass(eq=False)
class Group:
    """An attempt, its live sequences and the values that each must read back: one a computed token."""

    attempt: Attempt
    blocks: AttemptBlocks
    room: int
    """Tokens of output that fit into the attempt."""
    live: dict[DecodeSequence, list[int]] = field(default_factory=dict)


class Blocks(RuleBasedStateMachine):
    """Attempts of several sequences come, step, fork and go, beside others who want blocks too."""

    def __init__(self) -> None:
        super().__init__()
        layout = KVLayout(1, 1, 1, SIZE, torch.float32)
        self.memory, self.pool = KVMemory(layout, TOTAL), BlockPool(TOTAL)
        self.prefixes = PrefixPublisher(self.pool, SIZE, lambda added, removed: None)
        self.groups: list[Group] = []
        self.others: list[int] = []
        self.written = 0

    def lane(self, block: int, position: int) -> torch.Tensor:
        return self.memory.data[block, 0, 1, 0, position % SIZE : position % SIZE + 1]

    @rule(tokens=st.integers(1, 11), sequences=st.integers(1, 4), reserve=st.booleans(), cache=st.booleans())
    def handoff(self, tokens: int, sequences: int, reserve: bool, cache: bool) -> None:
        room = 6
        name = f"r{self.written}"
        message = work((name, 1), range(self.written, self.written + tokens), room, choices=range(sequences))
        message.reserve_worst_case, message.cache_write = reserve, cache
        attempt = Attempt.from_work(message, max_context=100)
        needed = -(-tokens // SIZE)
        if reserve:
            most = max_blocks(attempt, layout=self.memory.layout, total_blocks=TOTAL)
            needed, sequences = most.blocks, most.groups
        if self.pool.available() < needed:
            return
        group = Group(attempt, AttemptBlocks(attempt, self.pool, self.memory, self.prefixes), room)
        handed = self.pool.allocate(needed)
        values = []
        for position in range(tokens):  # the prefill worker's part
            self.written += 1
            self.lane(handed[position // SIZE], position)[0] = self.written
            values.append(self.written)
        group.blocks.adopt_prompt(handed, tokens)
        for _ in range(sequences):
            sequence = DecodeSequence(tokens, [], attempt.sample_row(attempt.params, []))
            group.blocks.start(sequence)
            sequence.output_ids.append(0)
            group.live[sequence] = list(values)
        group.blocks.release_prompt()
        self.groups.append(group)

    @precondition(lambda self: self.groups)
    @rule(data=st.data())
    def step_some(self, data: st.DataObject) -> None:
        """Some sequences of an attempt take a token each; what that needs is known beforehand."""
        group = data.draw(st.sampled_from(self.groups))
        able = [one for one in group.live if len(one.output_ids) < group.room]
        chosen = [one for one in able if data.draw(st.booleans())]
        before, need = self.pool.available(), group.blocks.group_demand(chosen)
        if need > before:
            assert not group.attempt.reserve_worst_case, "what is reserved is there"
            return
        for sequence in chosen:
            alone, shared = group.blocks.demand(sequence)
            was = self.pool.available()
            group.blocks.ensure_block(sequence)
            assert was - self.pool.available() == alone + (shared is not None)
        assert before - self.pool.available() == need
        for sequence in chosen:
            position = sequence.num_tokens - 1
            block = sequence.block_ids[position // SIZE]
            assert self.pool.references(block) == 1, "no other sequence reads the block that is written now"
            self.written += 1
            self.lane(block, position)[0] = self.written
            group.live[sequence].append(self.written)
            sequence.output_ids.append(self.written)
            group.blocks.publish(sequence)

    @precondition(lambda self: any(not group.attempt.reserve_worst_case for group in self.groups))
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        group = data.draw(st.sampled_from([g for g in self.groups if not g.attempt.reserve_worst_case]))
        if not group.live or len(group.live) > 5:
            return
        parent = data.draw(st.sampled_from(list(group.live)))
        child = DecodeSequence(parent.prompt_tokens, list(parent.output_ids), parent.next_row)
        group.blocks.fork(parent, child)
        group.live[child] = list(group.live[parent])

    @precondition(lambda self: self.groups)
    @rule(data=st.data())
    def end_one(self, data: st.DataObject) -> None:
        group = data.draw(st.sampled_from(self.groups))
        if group.live:
            sequence = data.draw(st.sampled_from(list(group.live)))
            del group.live[sequence]
            group.blocks.release([sequence])
        if not group.live:
            group.blocks.close()
            self.groups.remove(group)

    @rule(count=st.integers(1, 6))
    def others_take(self, count: int) -> None:
        if count <= self.pool.available():
            fresh = self.pool.allocate(count)
            self.others += fresh
            for block in fresh:
                self.memory.data[block] = -1.0

    @rule(count=st.integers(1, 6))
    def others_give(self, count: int) -> None:
        self.pool.release(self.others[:count])
        self.others = self.others[count:]

    @rule()
    def flush_the_cache(self) -> None:
        self.pool.clear_cache()

    @invariant()
    def everybody_reads_what_he_wrote(self) -> None:
        self.pool.invariants()
        for group in self.groups:
            for sequence, values in group.live.items():
                read = [
                    int(self.lane(sequence.block_ids[position // SIZE], position)[0])
                    for position in range(len(values))
                ]
                assert read == values

    def teardown(self) -> None:
        for group in self.groups:
            group.blocks.release(list(group.live))
            group.blocks.close()
        self.pool.release(self.others)
        assert self.pool.available() == TOTAL


TestBlocks = Blocks.TestCase
TestBlocks.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_max_blocks_counts_shared_blocks_once():
    def needs(choices: int, prompt: int, max_tokens: int, total: int, **changes: object) -> tuple[int, int]:
        message = work(("r", 1), range(prompt), max_tokens, choices=range(choices), **changes)
        attempt, layout = Attempt.from_work(message, max_context=999), KVLayout(1, 1, 1, 4, torch.float32)
        most = max_blocks(attempt, layout=layout, total_blocks=total)
        return most.blocks, most.groups

    assert needs(1, 9, 7, 99) == (4, 1)
    assert needs(3, 9, 7, 99) == (2 + 3 * 2, 3)
    assert needs(3, 9, 7, 7) == (2 + 2 * 2, 2)
    assert needs(3, 9, 7, 3) == (4, 1), "one alone does not fit: the grant is refused for good"
    assert needs(2, 8, 1, 99, sampling={"beam_width": 5}) == (2 + 5, 1)
    assert needs(2, 8, 1, 4, sampling={"beam_width": 5}) == (4, 1)


def test_distrusted_blocks_are_not_published_again_by_other_holders():
    """An attempt that was granted cached blocks before they were found bad would enter them again."""
    memory, pool = KVMemory(KVLayout(1, 1, 1, SIZE, torch.float32), TOTAL), BlockPool(TOTAL)
    prefixes = PrefixPublisher(pool, SIZE, lambda added, removed: None)

    def attach(name: str) -> tuple[Attempt, AttemptBlocks]:
        attempt = Attempt.from_work(work((name, 1), range(9), 3), max_context=999)
        return attempt, AttemptBlocks(attempt, pool, memory, prefixes)

    bad, first = attach("a")
    _, second = attach("b")
    first.adopt_prompt(pool.allocate(3), 9)
    keys, _ = pool.drain_events()
    assert len(keys) == 2
    prefixes.distrust(bad)
    assert pool.match(keys) == 0
    second.adopt_prompt(pool.allocate(3), 9)
    assert pool.match(keys) == 0
    _, third = attach("c")
    third.adopt_prompt(pool.allocate(3), 9)
    assert pool.match(keys) == 2, "who comes later may be trusted"
