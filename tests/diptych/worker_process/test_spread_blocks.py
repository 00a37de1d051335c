"""Blocks whose shares are in several memories: gathered, scattered and copied whole.

The ranks are threads with real connections, and the program's own service of them.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest
import torch

from diptych.engine.kv.kv_memory import KVLayout, KVMemory
from diptych.engine.parallel.kv_shares import KVShare
from diptych.worker_process.group.orders import WriteShare
from diptych.worker_process.group.remote_rank import DamagedShare
from diptych.worker_process.group.spread_blocks import SpreadShares
from kvtransfer.transports.host_blocks import read_block, write_block
from kvtransfer.transports.rank_data import share_hash
from tests.kvtransfer.thread_ranks import GroupOver, ThreadRank

LAYOUT = KVLayout(num_layers=3, num_kv_heads=3, head_dim=4, block_size=2, dtype=torch.bfloat16)
DRAFT = KVLayout(num_layers=2, num_kv_heads=1, head_dim=6, block_size=2, dtype=torch.float32)
SHARES = (
    KVShare(range(2), range(1)),
    KVShare(range(2), range(1, 3)),
    KVShare(range(2, 3), range(1)),
    KVShare(range(2, 3), range(1, 3)),
)
"""Two stages of two ranks: rank 0 has the first one."""


@pytest.fixture
def ranks() -> Iterator[list[ThreadRank]]:
    """The three other ranks."""
    made = [ThreadRank(share, LAYOUT, 4, in_step=True) for share in SHARES[1:]]
    yield made
    for rank in made:
        rank.close()


@pytest.fixture
def memory(ranks: Sequence[ThreadRank]) -> KVMemory:
    """Rank 0's."""
    memory = KVMemory(LAYOUT, 4)
    others = [(one.rank, share) for one, share in zip(ranks, SHARES[1:], strict=True)]
    memory.spread = SpreadShares(memory, 0, SHARES[:1], others)
    return memory


def payload(seed: int, size: int = LAYOUT.bytes_per_block) -> memoryview:
    generator = torch.Generator().manual_seed(seed)
    made = torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator)
    return memoryview(bytearray(made.numpy().tobytes()))


def bits(numbers: torch.Tensor) -> torch.Tensor:
    return numbers.contiguous().view(torch.int16)


def test_a_block_is_scattered_by_index_and_gathered_whole(memory: KVMemory, ranks: list[ThreadRank]) -> None:
    block = payload(1)
    write_block(memory, 2, block)
    for rank in ranks:
        rank.carry_out_next()
    whole = torch.frombuffer(block, dtype=LAYOUT.dtype).view(LAYOUT.block_shape)
    for share, held in zip(SHARES[1:], ranks, strict=True):
        assert torch.equal(bits(held.memory.data[2]), bits(share.of(whole)))
    assert torch.equal(bits(SHARES[0].of(memory.data[2])), bits(SHARES[0].of(whole)))
    assert not bits(memory.data[2][2:]).any(), "what others hold is not here"
    assert bytes(read_block(memory, 2)) == bytes(block)


def test_shares_off_by_one_head_are_other_bytes(memory: KVMemory, ranks: list[ThreadRank]) -> None:
    """The control."""
    block = payload(1)
    write_block(memory, 2, block)
    for rank in ranks:
        rank.carry_out_next()
    shifted = [(ranks[0].rank, KVShare(range(2), range(2)))]
    memory.spread = SpreadShares(memory, 0, SHARES[:1], shifted)
    assert bytes(read_block(memory, 2)) != bytes(block)


def test_a_copy_follows_the_write_before_it(memory: KVMemory, ranks: list[ThreadRank]) -> None:
    block = payload(2)
    write_block(memory, 1, block)
    memory.copy_block(1, 3)
    for rank in ranks:
        rank.carry_out_next()
        rank.carry_out_next()
    assert bytes(read_block(memory, 3)) == bytes(block)


def test_a_block_is_read_once_the_writes_before_are_carried_out(
    memory: KVMemory, ranks: list[ThreadRank]
) -> None:
    """A prefix may be pulled while the ranks have a step between them and its bytes."""
    block = payload(3)
    write_block(memory, 0, block)
    found: list[bytes] = []
    reading = threading.Thread(target=lambda: found.append(bytes(read_block(memory, 0))))
    reading.start()
    reading.join(0.1)
    assert reading.is_alive()
    for rank in ranks:
        rank.carry_out_next()
    reading.join()
    assert found == [bytes(block)]


def test_bytes_that_change_on_their_way_end_the_group(memory: KVMemory, ranks: list[ThreadRank]) -> None:
    """Both ways: a rank refuses what it is to write, and rank 0 what it has read."""
    order = WriteShare(0, 2, share_hash(b"other"), bytes(ranks[0].memory.layout.bytes_per_block))
    with pytest.raises(ValueError, match="damaged"):
        ranks[0].own.carry_out(order)
    damaging = ThreadRank(SHARES[1], LAYOUT, 4, damages=True)
    memory.spread = SpreadShares(memory, 0, SHARES[:1], [(damaging.rank, SHARES[1])])
    with pytest.raises(GroupOver) as ended:
        read_block(memory, 2)
    assert isinstance(ended.value.__cause__, DamagedShare)
    damaging.close()


def test_writes_wait_for_no_network_that_stalls(ranks: list[ThreadRank]) -> None:
    """More bytes than the connection holds, of which the rank reads none until all are given to it."""
    one, count = ranks[0], 20_000
    share = bytes(payload(4)[: one.memory.layout.bytes_per_block])
    for _ in range(count):
        one.rank.write_share(0, 1, share)
    for _ in range(count):
        one.carry_out_next()
    assert bytes(one.memory.block_bytes(1)) == share


@pytest.mark.parametrize("held", [None, SHARES[0]], ids=["whole", "share"])
def test_a_draft_models_segment_lies_in_rank_0s_memory_and_goes_with_whole_blocks(
    held: KVShare | None, ranks: list[ThreadRank]
) -> None:
    """Rank 0 has whole blocks, as with ranks of other hosts, or its own share, as on GPUs."""
    both = replace(LAYOUT, draft=DRAFT)
    memory = KVMemory(both if held is None else held.narrow(both), 4)
    if held is not None:
        memory = memory.as_share_of(both, held.layers.start, held.heads.start)
    others = [(one.rank, share) for one, share in zip(ranks, SHARES[1:], strict=True)]
    memory.spread = SpreadShares(memory, 0, SHARES[:1], others)
    assert memory.draft is not None
    for rank in ranks:
        assert rank.memory.layout.draft is None

    block = payload(5, both.bytes_per_block)
    write_block(memory, 2, block)
    memory.copy_block(2, 1)
    for rank in ranks:
        rank.carry_out_next()
        rank.carry_out_next()
    drafted = bytes(block[both.draft_offset :][: DRAFT.own_bytes])
    for number in (1, 2):
        assert memory.draft.data[number].numpy().tobytes() == drafted
        found = bytes(read_block(memory, number))
        assert found[: LAYOUT.own_bytes] == bytes(block[: LAYOUT.own_bytes])
        assert found[both.draft_offset :][: DRAFT.own_bytes] == drafted

    own = memory.without_draft()
    assert bytes(read_block(own, 2)) == bytes(block[: LAYOUT.own_bytes])
    other = payload(6)
    write_block(own, 2, other)
    for rank in ranks:
        rank.carry_out_next()
    assert bytes(read_block(own, 2)) == bytes(other)
    assert memory.draft.data[2].numpy().tobytes() == drafted, "without its segment the rest stays as it is"


def test_a_rank_that_is_gone_ends_the_group(memory: KVMemory, ranks: list[ThreadRank]) -> None:
    ranks[1].close()
    with pytest.raises(GroupOver):
        read_block(memory, 2)
