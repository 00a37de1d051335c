"""Blocks over a buffer: shape, aliasing, bounds."""

from __future__ import annotations

import mmap
from dataclasses import replace

import pytest
import torch

from diptych.engine.kv.kv_memory import KVLayout, KVMemory

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


def test_blocks_on_a_device_are_one_zeroed_allocation_that_the_host_does_not_address() -> None:
    memory = KVMemory.on_device(LAYOUT, 4, "cpu")  # the CPU stands for any device
    assert memory.data.shape == KVMemory(LAYOUT, 4).data.shape
    assert memory.data.is_contiguous()
    assert memory.nbytes == 4 * LAYOUT.bytes_per_block
    assert not memory.data.any()
    memory.data[1] = torch.randn_like(memory.data[1])
    memory.copy_block(1, 3)
    assert torch.equal(memory.data[3], memory.data[1])
    with pytest.raises(RuntimeError, match="from the host"):
        memory.block_bytes(1)
    for block in (-1, 4):
        with pytest.raises(IndexError):
            memory.block_bytes(block)
        with pytest.raises(IndexError):
            memory.copy_block(0, block)


def test_over_tensor_lays_blocks_over_a_foreign_tensor() -> None:
    flat = torch.zeros(3 * LAYOUT.bytes_per_block + 5, dtype=torch.uint8)
    one, two = KVMemory.over_tensor(LAYOUT, 3, flat), KVMemory.over_tensor(LAYOUT, 2, flat)
    one.data[1] = 2.5
    assert (two.data[1] == 2.5).all()
    assert one.address == two.address == flat.data_ptr()
    eight = KVLayout(3, 2, 40, 16, torch.float8_e4m3fn)
    assert KVMemory.over_tensor(eight, 3, flat).data.dtype == torch.float8_e4m3fn
    with pytest.raises(ValueError, match="need"):
        KVMemory.over_tensor(LAYOUT, 4, flat)
    with pytest.raises(ValueError, match="bytes"):
        KVMemory.over_tensor(LAYOUT, 1, flat.view(-1, 1))
    with pytest.raises(ValueError, match="at least one"):
        KVMemory.on_device(LAYOUT, 0, "cpu")


def test_blocks_for_rounds_up() -> None:
    assert [LAYOUT.blocks_for(n) for n in (0, 1, 16, 17)] == [0, 1, 1, 2]


def test_latents_take_one_vector_a_token_and_layer() -> None:
    layout = KVLayout(3, 1, 576, 16, torch.bfloat16, latent=True)
    assert layout.block_shape == (3, 1, 1, 576 * 16)
    assert layout.bytes_per_block == 3 * 576 * 16 * 2
    assert layout.name != LAYOUT.name
    assert KVMemory(layout, 2).data.shape == (2, *layout.block_shape)
    with pytest.raises(ValueError, match="num_kv_heads must be 1"):
        KVLayout(3, 2, 576, 16, torch.bfloat16, latent=True)


DRAFT = KVLayout(num_layers=1, num_kv_heads=1, head_dim=10, block_size=16, dtype=torch.float32)
BOTH = replace(LAYOUT, draft=DRAFT)


def test_a_second_segment_lies_behind_the_first_in_each_block() -> None:
    memory = KVMemory(BOTH, 4)
    assert memory.draft is not None
    assert BOTH.draft_offset >= LAYOUT.bytes_per_block
    assert BOTH.draft_offset % 64 == BOTH.bytes_per_block % 64 == 0
    assert memory.draft.address == memory.address + BOTH.draft_offset
    assert memory.stride_bytes == memory.draft.stride_bytes == BOTH.bytes_per_block
    memory.data[:] = 1.0
    assert not memory.draft.data.any()
    memory.draft.data[2] = 2.0
    memory.data[2] = 3.0
    memory.copy_block(2, 1)
    assert [float(memory.draft.data[block].mean()) for block in range(4)] == [0.0, 2.0, 2.0, 0.0]
    assert [float(memory.data[block].float().mean()) for block in range(4)] == [1.0, 3.0, 3.0, 1.0]
    assert bytes(memory.block_bytes(1)) == bytes(memory.block_bytes(2)) == bytes(memory.blocks[1].numpy())


def test_segments_of_other_blocks_are_refused() -> None:
    with pytest.raises(ValueError, match="as many tokens"):
        replace(LAYOUT, draft=replace(DRAFT, block_size=8))
    with pytest.raises(ValueError, match="no further segment"):
        replace(LAYOUT, draft=BOTH)
