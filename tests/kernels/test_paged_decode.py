"""The decode half of paged attention equals the meaning, a sequence at a time."""

from __future__ import annotations

import pytest
import torch

from kernels.kv_blocks import write_kv_rows
from kernels.paged_attention import paged_attention, write_kv
from kernels.paged_decode import paged_decode


@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "block_size"), [(9, 3, 64, 16), (6, 3, 40, 16), (5, 1, 8, 7)]
)
@pytest.mark.parametrize("window", [None, 1, 13])
def test_paged_decode_equals_paged_attention_by_row(
    heads: int, kv_heads: int, head_dim: int, block_size: int, window: int | None
) -> None:
    torch.manual_seed(1)
    lengths = torch.tensor([1, block_size - 1, block_size, block_size + 1, 3 * block_size])
    memory = torch.full((20, 2, 2, kv_heads, head_dim * block_size), torch.nan)
    tables = torch.randperm(20)[:15].view(5, 3)
    for table, length in zip(tables, lengths.tolist(), strict=True):
        past = torch.randn(2, length - 1, kv_heads, head_dim)
        write_kv(memory, 1, table, 0, past[0], past[1])
    q, k, v = (torch.randn(5, n, head_dim) for n in (heads, kv_heads, kv_heads))
    by_row = memory.clone()
    at = lengths - 1
    write_kv_rows(by_row, 1, tables[torch.arange(5), at // block_size], at % block_size, k, v)
    got = paged_decode(q, by_row, 1, tables, lengths, window)
    for row, length in enumerate(lengths.tolist()):
        write_kv(memory, 1, tables[row], length - 1, k[row : row + 1], v[row : row + 1])
        expected = paged_attention(q[row : row + 1], memory, 1, tables[row], length - 1, window)
        torch.testing.assert_close(got[row : row + 1], expected, atol=1e-5, rtol=0)
    torch.testing.assert_close(by_row, memory, equal_nan=True)
