"""Shares of blocks: every process' layers and heads, which together are whole blocks."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from diptych.engine.kv.kv_memory import KVMemory
from diptych.engine.parallel.kv_shares import KVShare, kv_shares, whole_share
from diptych.engine.parallel.stages import Grid, deal_stages
from diptych.engine.weights.checkpoint import open_checkpoint
from diptych.engine.weights.reader import OpenCheckpoint
from tests.diptych.engine.models.family_models import config_of, oracle_of, save, text_of
from tests.diptych.engine.parallel.thread_ranks import ThreadGroup, memory_of

pytestmark = pytest.mark.usefixtures("one_thread")
TEXT, GREEDY = 40, 8


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> OpenCheckpoint:
    """Six query heads, three KV heads."""
    folder = save(oracle_of(config_of("smollm3")), tmp_path_factory.mktemp("m"))
    return open_checkpoint(folder, "fp32")


def shares_of(group: ThreadGroup, grid: Grid) -> tuple[KVShare, ...]:
    return kv_shares(group.parts, deal_stages(group.shape, grid.stages), grid)


@pytest.mark.parametrize(("ranks", "stages"), [(1, 2), (2, 1), (3, 1), (6, 1), (2, 2)])
def test_shares_cover_a_block(model: OpenCheckpoint, ranks: int, stages: int) -> None:
    group = ThreadGroup(model, 6, ranks, stages=stages)
    layout = memory_of(model.shape).layout
    covered = torch.zeros(layout.block_shape)
    for share in shares_of(group, Grid(ranks, stages)):
        share.of(covered).add_(1)
    # Six parts of three KV heads: ranks have heads in common, unless each has whole heads.
    assert (covered.min(), covered.max()) == {2: (1, 2), 6: (2, 2)}.get(ranks, (1, 1))
    assert whole_share(layout).of(covered).shape == covered.shape


@pytest.mark.parametrize(("ranks", "stages"), [(1, 2), (2, 1), (3, 1), (6, 1), (2, 2)])
def test_memories_of_shares_are_the_pool_cut_by_index(model: OpenCheckpoint, ranks: int, stages: int) -> None:
    """Every rank holds its share alone, and goes on from it with the same tokens."""
    text = text_of(TEXT)
    pool = memory_of(model.shape)
    ThreadGroup(model, 6, 1).step(pool, 0, text[:-1])
    expected = ThreadGroup(model, 6, 1).decode(pool, text, GREEDY)[0]
    shares = shares_of(ThreadGroup(model, 6, ranks, stages=stages), Grid(ranks, stages))
    group = ThreadGroup(model, 6, ranks, stages=stages, held=shares)
    own = [KVMemory(share.narrow(pool.layout), pool.num_blocks) for share in shares]
    group.step(own, 0, text[:-1])
    for share, memory in zip(shares, own, strict=True):
        blocks = -(-(TEXT - 1) // pool.layout.block_size)
        lanes = share.of(pool.data[:blocks])
        assert memory.nbytes < pool.nbytes
        # The last token of the text is in the pool alone, which has gone on from there.
        assert torch.equal(memory.data[: blocks - 1], lanes[: blocks - 1])
    assert group.decode(own, text, GREEDY)[0] == expected


def test_shares_with_heads_off_by_one_give_other_tokens(model: OpenCheckpoint) -> None:
    """The control: memories filled with the share of the next head."""
    text = text_of(TEXT)
    pool = memory_of(model.shape)
    ThreadGroup(model, 3, 1).step(pool, 0, text[:-1])
    shares = shares_of(ThreadGroup(model, 3, 3), Grid(3))
    shifted = [replace(shares[0], heads=shares[(at + 1) % 3].heads) for at in range(3)]
    group = ThreadGroup(model, 3, 3, held=shares)

    def filled(chosen: list[KVShare] | tuple[KVShare, ...]) -> list[KVMemory]:
        own = [KVMemory(share.narrow(pool.layout), pool.num_blocks) for share in shares]
        for memory, share in zip(own, chosen, strict=True):
            memory.data.copy_(share.of(pool.data))
        return own

    right, wrong = filled(shares), filled(shifted)
    expected = ThreadGroup(model, 3, 1).decode(pool, text, GREEDY)
    assert group.decode(right, text, GREEDY)[0] == expected[0]
    assert group.decode(wrong, text, GREEDY)[0] != expected[0]
