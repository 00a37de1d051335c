"""Copies of blocks move all bits and only those, and their digests know place, binding and every bit."""

from __future__ import annotations

import pytest
import torch

from kernels import copy_blocks as meaning
from kernels.gpu.copy_blocks import copy_blocks


def memory(count: int, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Random bits: NaN of all kinds are among them."""
    size = int(torch.tensor(shape).prod()) * dtype.itemsize
    return (
        torch.randint(0, 256, (count, size), dtype=torch.uint8, device=device).view(dtype).view(count, *shape)
    )


def same_bits(first: torch.Tensor, second: torch.Tensor) -> bool:
    return torch.equal(first.view(torch.uint8), second.view(torch.uint8))


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        ((3, 2, 2, 64 * 16), torch.bfloat16),
        ((1, 2, 1, 40 * 7), torch.float32),
        ((2, 2, 3, 8 * 3), torch.float8_e4m3fn),
        ((1, 2, 1, 1), torch.float8_e4m3fn),
    ],
)
def test_blocks_are_copied_with_their_digests(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> None:
    torch.manual_seed(1)
    source, target = memory(7, shape, dtype, device), memory(6, shape, dtype, device)
    source_ids = torch.tensor([6, 0, -1, 3, 5], device=device)
    target_ids = torch.tensor([1, 5, 2, 0, -1], device=device)
    binding = meaning.bind(3, 2**40, torch.arange(5, device=device))
    digests = torch.full((5,), 99, device=device)
    expected = target.clone()
    meaning.copy_blocks(source, source_ids, expected, target_ids)
    copy_blocks(source, source_ids, target, target_ids, digests=digests, binding=binding)
    assert same_bits(target, expected)
    real = source_ids >= 0
    assert torch.equal(digests[real], meaning.block_digests(source, source_ids[real], binding[real]))
    copied = real & (target_ids >= 0)
    assert torch.equal(digests[copied], meaning.block_digests(target, target_ids[copied], binding[copied]))
    assert digests[2] == 0


def test_a_digest_knows_every_bit_its_place_and_its_grant() -> None:
    torch.manual_seed(2)
    blocks = memory(1, (1, 2, 1, 32), torch.float32, torch.device("cpu"))
    words, ids = meaning.block_words(blocks), torch.zeros(1, dtype=torch.int64)
    bindings = [meaning.bind(*grant) for grant in ((1, 2, ids), (2, 1, ids), (1, 3, ids), (1, 2, ids + 1))]
    seen = {int(meaning.block_digests(blocks, ids, binding)) for binding in bindings}
    for word in range(words.shape[1]):
        for bit in (0, 1, 31, 62):
            words[0, word] ^= 1 << bit
            seen.add(int(meaning.block_digests(blocks, ids, bindings[0])))
            words[0, word] ^= 1 << bit
    words[0, [3, 9]] = words[0, [9, 3]]
    seen.add(int(meaning.block_digests(blocks, ids, bindings[0])))
    assert len(seen) == 4 + 4 * words.shape[1] + 1


def test_without_digests_ids_may_be_of_either_width(device: torch.device) -> None:
    torch.manual_seed(3)
    source, target = (memory(3, (2, 2, 1, 16), torch.float16, device) for _ in range(2))
    copy_blocks(
        source,
        torch.tensor([2, 1], dtype=torch.int32, device=device),
        target,
        torch.tensor([0, 1], device=device),
    )
    assert same_bits(target[:2], source[[2, 1]])


def test_copy_blocks_refuses_memories_that_do_not_fit(device: torch.device) -> None:
    small, large = (memory(2, (1, 2, 2, 8 * size), torch.float16, device) for size in (4, 8))
    ids = torch.zeros(1, dtype=torch.int64, device=device)
    with pytest.raises(ValueError, match="are not"):
        copy_blocks(small, ids, large, ids)
    with pytest.raises(ValueError, match="binding"):
        copy_blocks(small, ids, small, ids, digests=ids)
