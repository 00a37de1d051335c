"""Blocks behind a window: prompts by a ring, cached prefixes, forks and copies, and each reads what it wrote.

The value of a token is a function of all tokens up to it, so that a hit on another request's blocks can be
checked, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from xxhash import xxh3_64_intdigest

from decode_worker.max_blocks import max_blocks
from decode_worker.prefix_publisher import PrefixPublisher
from decode_worker.sequence import AttemptBlocks, DecodeSequence
from decode_worker.window_rows import WindowRows
from diptych.engine.kv.block_pool import BlockPool
from diptych.engine.kv.kv_memory import KVLayout, KVMemory
from diptych.engine.kv.window_groups import WindowGroups
from diptych.engine.kv.window_prefix import WindowPrefix
from diptych.engine.kv.window_table import PromptWindow
from diptych.runtime.block_hash import block_keys
from diptych.runtime.discovery.prefix_index import PrefixEvent, PrefixIndex, PrefixSnapshot
from diptych.runtime.discovery.records import Identity
from diptych.worker_process.attempt import Attempt
from kvtransfer.drivers.window_grant import split_grant
from kvtransfer.protocol.messages import PendingTransfer
from kvtransfer.protocol.window_allocator import WindowAllocator
from tests.diptych.worker_process.scripted_gateway import work

SIZE, WINDOW, TOTAL, ROOM = 4, 7, 70, 14
GROUPS = WindowGroups(WINDOW, 1, 2, ((1, 0), (0, 0), (2, 0)))
REACH = GROUPS.kept(SIZE) - 1
LIFE = Identity(1, 1)
LAYOUT = replace(KVLayout(3, 1, 1, SIZE, torch.float32), windows=GROUPS)


def value(tokens: Sequence[int], position: int) -> int:
    return xxh3_64_intdigest(repr(list(tokens[: position + 1])).encode()) % (1 << 20)


@dataclass(eq=False)
class Group:
    """An attempt and its live sequences."""

    attempt: Attempt
    blocks: AttemptBlocks
    live: list[DecodeSequence] = field(default_factory=list)

    def tokens(self, sequence: DecodeSequence) -> list[int]:
        return [*self.attempt.prompt_ids, *sequence.output_ids]


class Windows(RuleBasedStateMachine):
    """Attempts of several sequences come, step, fork and go, beside others who want blocks, too."""

    def __init__(self) -> None:
        super().__init__()
        self.memory, self.pool = KVMemory(LAYOUT, TOTAL), BlockPool(TOTAL)
        self.prefixes = PrefixPublisher(self.pool, SIZE, lambda added, removed: None)
        self.allocator = WindowAllocator(self.pool, SIZE, lambda: 0, GROUPS)
        self.groups: list[Group] = []
        self.others: list[int] = []
        self.hits = self.came = 0
        self.index, self.reports = PrefixIndex(), 0
        self.index.load(PrefixSnapshot("worker", LIFE, 0, ()))

    def estimate(self, keys: Sequence[bytes]) -> int:
        """Return the cached blocks that a gateway expects, by what the pool reported."""
        self.reports += 1
        added, removed = (tuple(keys) for keys in self.pool.drain_events())
        assert self.index.apply(PrefixEvent("worker", LIFE, self.reports, added, removed))
        return self.index.usable_hits("worker", LIFE, keys, REACH)

    def lane(self, block: int, position: int) -> torch.Tensor:
        return self.memory.data[block, 0, 1, 0, position % SIZE : position % SIZE + 1]

    def write(self, blocks: Sequence[int], tokens: Sequence[int], position: int) -> None:
        for block in blocks:
            assert self.pool.references(block) == 1, "no other sequence reads the block that is written now"
            assert not self.pool.is_cached(block)
            self.lane(block, position)[0] = value(tokens, position)

    def check(self, blocks: Sequence[int], tokens: Sequence[int], position: int) -> None:
        for block in blocks:
            assert int(self.lane(block, position)[0]) == value(tokens, position)

    @rule(
        family=st.integers(0, 1),
        tokens=st.integers(1, 40),
        sequences=st.integers(1, 3),
        chunk=st.integers(1, 9),
        own=st.booleans(),
        reserve=st.booleans(),
    )
    def handoff(self, family: int, tokens: int, sequences: int, chunk: int, own: bool, reserve: bool) -> None:
        self.came += 1
        prompt = [1000 * family + n for n in range(tokens)] + [9000 + self.came] * own
        message = work((f"r{self.came}", 1), prompt, ROOM, choices=range(sequences))
        message.reserve_worst_case = reserve
        attempt = Attempt.from_work(message, max_context=200)
        keys = block_keys(attempt.cache_namespace, prompt, SIZE)
        pending = PendingTransfer(attempt.key, len(prompt), keys, sequences=sequences)
        if reserve:
            most = max_blocks(attempt, layout=LAYOUT, total_blocks=TOTAL)
            sequences = most.groups
            pending = replace(pending, reserve_blocks=most.blocks, reserve_windowed=most.windowed)
        expected = self.estimate(keys[: (len(prompt) - 1) // SIZE])
        if (found := self.allocator.allocate(pending, chunk)) is None:
            return
        assert found.cached_blocks == expected, "gateways expect what is granted"
        cached = found.cached_blocks * SIZE
        self.hits += bool(cached)
        blocks = found.block_ids[: found.writable_blocks]
        full, window = split_grant(LAYOUT, len(prompt), blocks, cached, found.window_pins)
        assert window is not None
        self.prefill(full, window, prompt, cached, chunk)
        group = Group(attempt, AttemptBlocks(attempt, self.pool, self.memory, self.prefixes))
        group.blocks.adopt_prompt([*full, *found.block_ids[found.writable_blocks :]], len(prompt), window)
        for _ in range(sequences):
            sequence = DecodeSequence(
                len(prompt), [], attempt.sample_row(attempt.params, []), attempt=attempt
            )
            group.blocks.start(sequence)
            sequence.output_ids.append(7)
            group.live.append(sequence)
        group.blocks.release_prompt()
        self.groups.append(group)

    def prefill(
        self, full: Sequence[int], window: PromptWindow, prompt: Sequence[int], cached: int, chunk: int
    ) -> None:
        """Compute a prompt as its writer does."""
        for start in range(cached, len(prompt), chunk):
            for position in range(max(0, start - WINDOW + 1), start):
                self.check(window.blocks(position // SIZE), prompt, position)
            for position in range(start, min(start + chunk, len(prompt))):
                place = position // SIZE
                self.write([full[place], *window.blocks(place)], prompt, position)

    @precondition(lambda self: self.groups)
    @rule(data=st.data())
    def step_some(self, data: st.DataObject) -> None:
        """Let some sequences of an attempt take a token each; what that needs is known beforehand."""
        group = data.draw(st.sampled_from(self.groups))
        able = [one for one in group.live if len(one.output_ids) < ROOM]
        chosen = [one for one in able if data.draw(st.booleans())]
        before, need = self.pool.available(), group.blocks.group_demand(chosen)
        if need > before:
            assert not group.attempt.reserve_worst_case, "what is reserved is there"
            return
        for sequence in chosen:
            group.blocks.ensure_block(sequence)
        assert before - self.pool.available() == need
        for sequence in chosen:
            position, tokens = sequence.num_tokens - 1, group.tokens(sequence)
            assert sequence.window is not None
            place = position // SIZE
            self.write([sequence.block_ids[place], *sequence.window.at(place)], tokens, position)
            sequence.output_ids.append(data.draw(st.sampled_from([7, 8])))
            group.blocks.publish(sequence)
            assert len(sequence.window.tables[0]) <= GROUPS.kept(SIZE)

    @precondition(lambda self: any(not group.attempt.reserve_worst_case for group in self.groups))
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        group = data.draw(st.sampled_from([g for g in self.groups if not g.attempt.reserve_worst_case]))
        if not group.live or len(group.live) > 5:
            return
        parent = data.draw(st.sampled_from(group.live))
        child = DecodeSequence(parent.prompt_tokens, list(parent.output_ids), parent.next_row)
        group.blocks.fork(parent, child)
        group.live.append(child)

    @precondition(lambda self: self.groups)
    @rule(data=st.data())
    def end_one(self, data: st.DataObject) -> None:
        group = data.draw(st.sampled_from(self.groups))
        if group.live:
            sequence = data.draw(st.sampled_from(group.live))
            group.live.remove(sequence)
            group.blocks.release([sequence])
        if not group.live:
            group.blocks.close()
            self.groups.remove(group)

    @rule(count=st.integers(1, 30))
    def others_take(self, count: int) -> None:
        if count <= self.pool.available():
            fresh = self.pool.allocate(count)
            self.others += fresh
            for block in fresh:
                self.memory.data[block] = -1.0

    @rule(count=st.integers(1, 30))
    def others_give(self, count: int) -> None:
        self.pool.release(self.others[:count])
        self.others = self.others[count:]

    @rule()
    def flush_the_cache(self) -> None:
        self.pool.clear_cache()

    @precondition(lambda self: self.groups)
    @rule(data=st.data())
    def distrust(self, data: st.DataObject) -> None:
        """Forget an attempt's blocks; windowed ones go with the full ones that they belong to."""
        group = data.draw(st.sampled_from(self.groups))
        self.prefixes.distrust(group.attempt, [one.block_keys[0] for one in group.live if one.block_keys])

    @invariant()
    def everybody_reads_what_he_wrote(self) -> None:
        self.pool.invariants()
        assert all(len(key) == 16 for key in self.pool.cached_keys()), (
            "of a place one windowed block is listed"
        )
        for group in self.groups:
            for sequence in group.live:
                tokens, computed = group.tokens(sequence), sequence.num_tokens - 1
                for position in range(computed):
                    self.check([sequence.block_ids[position // SIZE]], tokens, position)
                assert sequence.window is not None
                for position in range(max(0, computed - WINDOW + 1), computed):
                    self.check(sequence.window.at(position // SIZE), tokens, position)

    def teardown(self) -> None:
        for group in self.groups:
            group.blocks.release(group.live)
            group.blocks.close()
        self.pool.release(self.others)
        assert self.pool.available() == TOTAL


TestWindows = Windows.TestCase
TestWindows.settings = settings(max_examples=30, stateful_step_count=30, deadline=None)
QUICK = settings(
    max_examples=100,
    stateful_step_count=30,
    deadline=None,
    database=None,
    phases=[Phase.generate],
    report_multiple_bugs=False,
    derandomize=True,
)


def ignore_windowed_blocks(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(WindowPrefix, "match", lambda self, keys: self._pool.match(keys))


def copy_no_windowed_block(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(WindowRows, "own", lambda self, sequence, place, writable: None)


@pytest.mark.parametrize("bug", [ignore_windowed_blocks, copy_no_windowed_block])
def test_the_machine_finds_a_bug(bug: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Controls: a hit whose windowed blocks are gone must fail, and so must a write to shared ones."""
    bug(monkeypatch)
    with pytest.raises((AssertionError, IndexError)):
        run_state_machine_as_test(Windows, settings=QUICK)
