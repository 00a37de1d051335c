"""Lanes of drafts, from blocks that nothing else needs, and the blocks that wait for the draft model."""

from __future__ import annotations

import torch

from decode_worker.prefix_publisher import PrefixPublisher
from decode_worker.sequence import MOST_BEHIND, AttemptBlocks, DecodeSequence
from diptych.engine.kv.block_pool import BlockPool
from diptych.engine.kv.kv_memory import KVLayout, KVMemory
from diptych.worker_process.attempt import Attempt
from tests.diptych.worker_process.scripted_gateway import work

SIZE, TOTAL = 4, 40
DRAFT = KVLayout(1, 1, 1, SIZE, torch.float32)


class Made:
    """A sequence of 6 prompt tokens and one of output over a pool with `free` blocks left."""

    def __init__(self, free: int, draft: bool = False) -> None:
        self.memory = KVMemory(KVLayout(1, 1, 1, SIZE, torch.float32, draft=DRAFT if draft else None), TOTAL)
        self.pool = BlockPool(TOTAL)
        self.freed = 0
        attempt = Attempt.from_work(work(("r", 1), tuple(range(6)), 90), max_context=200)
        prefixes = PrefixPublisher(self.pool, SIZE, lambda added, removed: None)
        self.blocks = AttemptBlocks(attempt, self.pool, self.memory, prefixes, on_freed=self.on_freed)
        self.blocks.adopt_prompt(self.pool.allocate(2), 6)
        self.one = DecodeSequence(6, [], attempt.sample_row(attempt.params, []))
        self.blocks.start(self.one)
        self.blocks.release_prompt()
        self.one.output_ids.append(50)
        self.others = self.pool.allocate(self.pool.available() - free)

    def on_freed(self) -> None:
        self.freed += 1

    def grow(self, tokens: int) -> None:
        for token in range(tokens):
            self.blocks.ensure_block(self.one)
            self.one.output_ids.append(token)
            self.blocks.publish(self.one)


def test_lanes_take_only_what_the_pool_has_to_spare_and_go_back() -> None:
    made = Made(free=3)
    assert made.blocks.reserve_lanes(made.one, 1, spare=3) == 1  # in the block of the next token
    assert made.pool.available() == 3
    assert made.blocks.reserve_lanes(made.one, 9, spare=3) == 1
    assert made.blocks.reserve_lanes(made.one, 9, spare=2) == 1 + SIZE
    assert made.blocks.reserve_lanes(made.one, 9, spare=0) == 9
    assert made.pool.available() == 1
    made.one.output_ids += [51, 52]  # two drafts were right: the next token is in the third block
    made.blocks.return_lanes(made.one)
    assert (len(made.one.block_ids), made.pool.available(), made.freed) == (3, 2, 1)
    made.blocks.return_lanes(made.one)
    assert made.freed == 1
    made.blocks.release([made.one])
    made.pool.release(made.others)
    assert made.pool.available() == TOTAL
    made.pool.invariants()


def test_a_block_is_published_once_the_draft_model_has_computed_it() -> None:
    made = Made(free=30, draft=True)
    assert made.one.draft_computed == 6
    made.grow(4)
    assert len(made.one.block_keys) == 1  # of two full ones
    made.one.draft_computed = 8
    made.blocks.publish(made.one)
    assert len(made.one.block_keys) == 2
    made.grow(MOST_BEHIND)
    assert made.one.draft_computed is None, "it is given up"
    assert len(made.one.block_keys) == (made.one.num_tokens - 1) // SIZE


def test_what_waited_is_published_at_the_end() -> None:
    made = Made(free=30, draft=True)
    made.grow(4)
    made.blocks.release([made.one])
    assert len(made.one.block_keys) == 2
