"""Conversion between arrangements of a KV memory moves all bits and only those; both ends find one digest."""

from __future__ import annotations

import pytest
import torch

from kernels import convert_blocks as meaning
from kernels.convert_blocks import HeadRange, KVView, block_major, common_heads, logical_digests, token_major
from kernels.copy_blocks import bind
from kernels.gpu.convert_blocks import convert_blocks

LAYERS, BLOCKS = 2, 9
DIGIT = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


def memory(
    kind: str, heads: int, head_dim: int, size: int, dtype: torch.dtype, device: torch.device
) -> KVView:
    """Random bits in one layout or another."""
    sizes: tuple[int, ...] = (BLOCKS, LAYERS, 2, heads, head_dim * size)
    if kind == "token-major":
        sizes = (BLOCKS, LAYERS, 2, size, heads, head_dim)
    elif (
        kind == "planes"
    ):  # all blocks of a layer's keys, then of its values: [2, layers, blocks, heads, ...]
        sizes = (2, LAYERS, BLOCKS, heads, size, head_dim)
    count = int(torch.tensor(sizes).prod()) * dtype.itemsize
    blocks = torch.randint(0, 256, (count,), dtype=torch.uint8, device=device).view(dtype).view(sizes)
    if kind == "planes":
        keys, values = blocks.transpose(1, 2).unbind(0)
        return KVView(keys, values)
    return token_major(blocks) if kind == "token-major" else block_major(blocks, head_dim)


def bits(view: KVView) -> list[torch.Tensor]:
    return [part.view(DIGIT[part.element_size()]).clone() for part in (view.keys, view.values)]


@pytest.mark.parametrize(
    ("source", "target", "dtype", "head_dim", "tokens"),
    [
        (("block-major", 16), ("block-major", 16), torch.bfloat16, 40, 50),
        (("block-major", 16), ("block-major", 32), torch.float8_e4m3fn, 40, 50),
        (("block-major", 64), ("block-major", 16), torch.float32, 40, 50),
        (("token-major", 16), ("block-major", 7), torch.float16, 40, 50),
        (("block-major", 32), ("planes", 16), torch.bfloat16, 40, 50),
        # Two whole tiles and a rest.
        (("block-major", 16), ("block-major", 64), torch.bfloat16, 32, 130),
        (("block-major", 16), ("token-major", 48), torch.float16, 32, 130),
    ],
)
def test_convert_blocks_copies_the_range_and_its_digest(
    source: tuple[str, int],
    target: tuple[str, int],
    dtype: torch.dtype,
    head_dim: int,
    tokens: int,
    device: torch.device,
) -> None:
    torch.manual_seed(4)
    heads = HeadRange(2, 1, 2)
    origin, place = (memory(k, 4, head_dim, s, dtype, device) for k, s in (source, target))
    tables = [torch.randperm(BLOCKS, device=device).int() for _ in range(2)]
    before = bits(place)
    units = -(-tokens // place.block_size)
    binding = bind(3, 2**40, torch.arange(units, device=device))
    digests = torch.full((units,), 99, device=device)
    convert_blocks(origin, tables[0], place, tables[1], heads, tokens, digests=digests, binding=binding)
    got = bits(place)
    for part, old in zip((place.keys, place.values), before, strict=True):
        part.view(DIGIT[part.element_size()]).copy_(old)
    meaning.convert_blocks(origin, tables[0], place, tables[1], heads, tokens)
    for one, other, old in zip(got, bits(place), before, strict=True):
        assert torch.equal(one, other)
        assert not torch.equal(one, old)
        assert torch.equal(one[:, :, :1], old[:, :, :1])  # a head that is another rank's
    unit = place.block_size
    for view, table, first in ((origin, tables[0], heads.source), (place, tables[1], heads.target)):
        found = logical_digests(view, table, first, heads.count, tokens, unit=unit, binding=binding)
        assert torch.equal(digests, found)


def test_common_heads_of_two_tensor_parallel_ranks(device: torch.device) -> None:
    """Two ranks hand over to four, and four to two: together the targets have every head once."""
    torch.manual_seed(5)
    whole, tokens, table = 4, 21, torch.arange(BLOCKS, device=device)
    full = memory("block-major", whole, 8, 16, torch.float16, device)
    for sources, targets in ((2, 4), (4, 2)):
        parts = [
            memory("block-major", whole // sources, 8, 16, torch.float16, device) for _ in range(sources)
        ]
        ends = [memory("token-major", whole // targets, 8, 32, torch.float16, device) for _ in range(targets)]
        for rank, part in enumerate(parts):
            own = common_heads(whole, (0, 1), (rank, sources))
            assert own is not None
            convert_blocks(full, table, part, table, own, tokens)
        for rank, part in enumerate(parts):
            for other, end in enumerate(ends):
                if (shared := common_heads(whole, (rank, sources), (other, targets))) is not None:
                    convert_blocks(part, table, end, table, shared, tokens)
        together = KVView(
            torch.cat([end.keys for end in ends], dim=2), torch.cat([end.values for end in ends], dim=2)
        )
        binding = bind(1, 1, torch.arange(1, device=device))
        found = [
            logical_digests(view, table, 0, whole, tokens, unit=32, binding=binding)
            for view in (full, together)
        ]
        assert torch.equal(*found)


def test_a_digest_knows_every_bit_its_place_and_its_grant() -> None:
    device = torch.device("cpu")
    torch.manual_seed(6)
    view, table = memory("token-major", 2, 4, 5, torch.float16, device), torch.tensor([3, 1])
    seen = set()

    def look(generation: int = 1) -> None:
        binding = bind(0, generation, torch.arange(2))
        seen.add(tuple(logical_digests(view, table, 0, 2, 7, unit=5, binding=binding).tolist()))

    look()
    look(2)
    numbers = view.keys.view(torch.int16)
    for lane in range(5):
        for bit in (0, 7, 14):
            numbers[3, 1, 0, lane, 2] ^= 1 << bit
            look()
            numbers[3, 1, 0, lane, 2] ^= 1 << bit
    kept = numbers[1, 0].clone()
    numbers[1, 0] = kept.flip(0)  # two heads change places
    look()
    numbers[1, 0] = kept
    numbers[1, :, :, 2:] = 0  # beyond the last token
    look()
    assert len(seen) == 1 + 1 + 15 + 1


def test_convert_blocks_refuses_views_that_do_not_fit(device: torch.device) -> None:
    small, wide, other = (
        memory("block-major", 2, dim, 4, dtype, device)
        for dim, dtype in ((8, torch.float16), (16, torch.float16), (8, torch.bfloat16))
    )
    ids = torch.zeros(1, dtype=torch.int64, device=device)
    for theirs in (wide, other):
        with pytest.raises(ValueError, match="are not"):
            convert_blocks(small, ids, theirs, ids, HeadRange(0, 0, 1), 4)
    with pytest.raises(ValueError, match="2 heads from 1 reach beyond those of the target"):
        convert_blocks(small, ids, small, ids, HeadRange(0, 1, 2), 4)
    with pytest.raises(ValueError, match="5 tokens do not fit into 1 blocks of the source"):
        convert_blocks(small, ids, small, ids, HeadRange(0, 0, 1), 5)
    with pytest.raises(ValueError, match="binding"):
        convert_blocks(small, ids, small, ids, HeadRange(0, 0, 1), 4, digests=ids)
    with pytest.raises(ValueError, match="4 KV heads are not dealt to rank 0 of 3"):
        common_heads(4, (0, 3), (0, 1))
    assert common_heads(4, (0, 4), (1, 2)) is None
