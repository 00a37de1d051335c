"""Paged attention and its write against dense attention: odd sizes, any block order, windows, block
borders.
"""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from kernels.paged_attention import paged_attention, write_kv

LAYERS = 2


def blocks(count: int, kv_heads: int, head_dim: int, block_size: int) -> torch.Tensor:
    return torch.full((count, LAYERS, 2, kv_heads, head_dim * block_size), torch.nan)


def dense(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, window: int | None) -> torch.Tensor:
    """torch's own attention of the last `len(q)` tokens over all of `k` and `v [tokens, kv_heads,
    head_dim]`.
    """
    end, start = k.shape[0], k.shape[0] - q.shape[0]
    at, seen = torch.arange(start, end).unsqueeze(1), torch.arange(end)
    mask = seen <= at if window is None else (seen <= at) & (seen > at - window)
    out = functional.scaled_dot_product_attention(
        q.transpose(0, 1)[None],
        k.transpose(0, 1)[None],
        v.transpose(0, 1)[None],
        attn_mask=mask,
        enable_gqa=True,
    )
    return out[0].transpose(0, 1)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "block_size"),
    [(9, 3, 64, 16), (6, 3, 40, 16), (5, 1, 8, 7), (4, 4, 2, 1)],
)
@pytest.mark.parametrize("window", [None, 1, 13, 1000])
def test_paged_attention_equals_dense_attention(
    heads: int, kv_heads: int, head_dim: int, block_size: int, window: int | None
) -> None:
    torch.manual_seed(1)
    for total in {1, block_size - 1, block_size, block_size + 1, 3 * block_size + 2} - {0}:
        q, k, v = (torch.randn(total, n, head_dim) for n in (heads, kv_heads, kv_heads))
        memory = blocks(8, kv_heads, head_dim, block_size)
        table = torch.randperm(8)
        for start, end in ((0, total // 2), (total // 2, total)):
            if start == end:
                continue
            write_kv(memory, 1, table, start, k[start:end], v[start:end])
            got = paged_attention(q[start:end], memory, 1, table, start, window)
            torch.testing.assert_close(got, dense(q[start:end], k[:end], v[:end], window), atol=1e-5, rtol=0)
        assert memory[:, 0].isnan().all(), "the other layer is not touched"


def test_write_kv_transposes_keys_and_not_values() -> None:
    memory = blocks(3, 2, 4, 5)
    keys, values = torch.arange(8.0).view(1, 2, 4), torch.arange(8.0, 16.0).view(1, 2, 4)
    write_kv(memory, 0, torch.tensor([2, 1]), 6, keys, values)
    assert memory[1, 0, 0].view(2, 4, 5)[:, :, 1].equal(keys[0])
    assert memory[1, 0, 1].view(2, 5, 4)[:, 1].equal(values[0])
    assert int((~memory.isnan()).sum()) == 16


def test_paged_attention_sums_bfloat16_in_float32() -> None:
    torch.manual_seed(3)
    q, k, v = (torch.randn(300, n, 64).bfloat16() for n in (3, 3, 3))
    memory = blocks(20, 3, 64, 16).bfloat16()
    table = torch.arange(19)
    write_kv(memory, 0, table, 0, k, v)
    got = paged_attention(q, memory, 0, table, 0)
    expected = dense(q.float(), k.float(), v.float(), None)
    assert got.dtype == torch.bfloat16
    torch.testing.assert_close(got.float(), expected, atol=4e-3, rtol=8e-3)
