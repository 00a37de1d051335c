"""Blocks over a buffer: shape, aliasing, bounds."""

from __future__ import annotations

import mmap

import pytest
import torch

from engine.kv_memory import KVLayout, KVMemory

LAYOUT = KVLayout(num_layers=3, num_kv_heads=2, head_dim=40, block_size=16, dtype=torch.bfloat16)


def test_a_block_is_one_region_over_all_layers() -> None:
    memory = KVMemory(LAYOUT, 5)
    assert memory.data.shape == (5, 3, 2, 2, 640)
    assert memory.data.stride(0) * 2 == LAYOUT.bytes_per_block
    memory.data[3] = 1.0
    assert memory.block_bytes(2) == bytes(LAYOUT.bytes_per_block)
    assert bytes(memory.block_bytes(3)) == bytes([0x80, 0x3F]) * (LAYOUT.bytes_per_block // 2)


def test_a_given_buffer_is_shared_and_blocks_are_copied_whole() -> None:
    buffer = mmap.mmap(-1, LAYOUT.bytes_per_block * 4)
    one, two = KVMemory(LAYOUT, 4, buffer), KVMemory(LAYOUT, 4, memoryview(buffer))
    assert one.address == two.address
    one.data[1] = torch.randn_like(one.data[1])
    two.copy_block(1, 3)
    assert torch.equal(one.data[3], one.data[1])
    assert not one.data[2].any()


def test_bad_buffers_and_blocks_are_refused() -> None:
    with pytest.raises(ValueError, match="need"):
        KVMemory(LAYOUT, 4, memoryview(bytearray(10)))
    with pytest.raises(ValueError, match="writable"):
        KVMemory(LAYOUT, 1, memoryview(bytes(LAYOUT.bytes_per_block)))
    with pytest.raises(IndexError):
        KVMemory(LAYOUT, 4).block_bytes(-1)
    with pytest.raises(ValueError, match="block_size"):
        KVLayout(1, 1, 2, 0, torch.float32)


def test_blocks_for_rounds_up() -> None:
    assert [LAYOUT.blocks_for(n) for n in (0, 1, 16, 17)] == [0, 1, 1, 2]
