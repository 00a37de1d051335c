"""Random sequences in shuffled blocks, as the attention kernels find them, and the same laid out densely for
peers that cannot read them in place.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

HEADS, KV_HEADS, HEAD_DIM, BLOCK_SIZE = 32, 8, 128, 16
"""Shape of Llama-3-8B and Qwen3-8B."""


@dataclass(frozen=True)
class PagedCase:
    """`rows` sequences of `tokens` tokens each, bfloat16, one layer."""

    rows: int
    tokens: int
    blocks: torch.Tensor
    """`[rows * n, 1, 2, KV_HEADS, HEAD_DIM * BLOCK_SIZE]`."""
    tables: torch.Tensor
    """int32 `[rows, n]`, a random permutation."""

    @property
    def kv_bytes(self) -> int:
        """Bytes of all keys and values: the fewest that decode attention must read."""
        return self.rows * self.tokens * 2 * KV_HEADS * HEAD_DIM * 2

    def dense(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values `[rows, KV_HEADS, tokens, HEAD_DIM]`."""
        count = self.tables.numel()
        ids = self.tables.flatten().long()
        keys = self.blocks[:, 0, 0].view(count, KV_HEADS, HEAD_DIM, BLOCK_SIZE)[ids]
        values = self.blocks[:, 0, 1].view(count, KV_HEADS, BLOCK_SIZE, HEAD_DIM)[ids]
        shape = (self.rows, -1, KV_HEADS, BLOCK_SIZE, HEAD_DIM)
        keys = keys.permute(0, 1, 3, 2).reshape(shape).transpose(1, 2)
        values = values.reshape(shape).transpose(1, 2)
        flat = (self.rows, KV_HEADS, -1, HEAD_DIM)
        return keys.reshape(flat)[:, :, : self.tokens], values.reshape(flat)[:, :, : self.tokens]

    def by_token(self) -> torch.Tensor:
        """Return the pages as `[pages, 2, BLOCK_SIZE, KV_HEADS, HEAD_DIM]`, FlashInfer's "NHD" layout."""
        count = self.tables.numel()
        keys = self.blocks[:, 0, 0].view(count, KV_HEADS, HEAD_DIM, BLOCK_SIZE).permute(0, 3, 1, 2)
        values = self.blocks[:, 0, 1].view(count, KV_HEADS, BLOCK_SIZE, HEAD_DIM).transpose(1, 2)
        return torch.stack([keys, values], dim=1)


def paged_case(rows: int, tokens: int, device: torch.device) -> PagedCase:
    """Fresh random numbers: nothing is ever timed on zeros."""
    pages = -(-tokens // BLOCK_SIZE)
    shape = (rows * pages, 1, 2, KV_HEADS, HEAD_DIM * BLOCK_SIZE)
    blocks = torch.empty(shape, dtype=torch.bfloat16, device=device).normal_()
    tables = torch.randperm(rows * pages, device=device).int().view(rows, pages)
    return PagedCase(rows, tokens, blocks, tables)


def random_query(rows: int, device: torch.device) -> torch.Tensor:
    """`[rows, HEADS, HEAD_DIM]`."""
    return torch.randn(rows, HEADS, HEAD_DIM, device=device, dtype=torch.bfloat16)
