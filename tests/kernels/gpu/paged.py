"""Random paged KV memory for the tests of attention kernels."""

from __future__ import annotations

from dataclasses import dataclass

import torch

LAYERS, LAYER = 2, 1


@dataclass(frozen=True)
class Heads:
    """Query heads, KV heads, numbers a head, tokens a block."""

    heads: int
    kv_heads: int
    head_dim: int
    block_size: int


ODD_HEADS = [
    Heads(9, 3, 64, 16),
    Heads(4, 4, 80, 16),
    Heads(4, 1, 96, 32),
    Heads(8, 1, 128, 64),
    Heads(9, 1, 256, 16),
]

DTYPES = [torch.float32, torch.float16, torch.bfloat16]

TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.2e-2}
"""Bounds of `error`. The interpreter cuts numbers off where it makes bfloat16, which a GPU rounds."""


@dataclass(frozen=True)
class Paged:
    """Sequences of the given lengths in shuffled blocks; lanes that hold no token are NaN."""

    blocks: torch.Tensor
    tables: torch.Tensor


def paged(
    heads: Heads, lengths: list[int], dtype: torch.dtype, device: torch.device, *, width: int = 0
) -> Paged:
    """Fill the blocks of sequences of `lengths`; tables are padded to `width` blocks with a block of NaN."""
    size = heads.block_size
    counts = [-(-length // size) for length in lengths]
    blocks = torch.full(
        (sum(counts) + 1, LAYERS, 2, heads.kv_heads, heads.head_dim * size), torch.nan, device=device
    )
    keys = blocks[:, LAYER, 0].view(-1, heads.kv_heads, heads.head_dim, size)
    values = blocks[:, LAYER, 1].view(-1, heads.kv_heads, size, heads.head_dim)
    order = torch.randperm(sum(counts)) + 1
    tables = torch.zeros(len(lengths), max(width, *counts, 1), dtype=torch.int32)
    at = 0
    for row, (length, count) in enumerate(zip(lengths, counts, strict=True)):
        tables[row, :count] = order[at : at + count].int()
        at += count
        for index in range(count):
            block, lanes = int(tables[row, index]), min(size, length - index * size)
            keys[block, :, :, :lanes] = torch.randn(heads.kv_heads, heads.head_dim, lanes, device=device)
            values[block, :, :lanes] = torch.randn(heads.kv_heads, lanes, heads.head_dim, device=device)
    return Paged(blocks.to(dtype), tables.to(device))


def error(got: torch.Tensor, expected: torch.Tensor) -> float:
    """Norm of the difference over the norm of what was expected, in float64; NaN never passes."""
    wide = expected.double()
    return float((got.double() - wide).norm() / wide.norm())
