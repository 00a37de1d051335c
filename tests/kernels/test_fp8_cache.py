"""Keys and values in FP8 are numbers of E4M3 times the scale of their layer and head, at every operator."""

from __future__ import annotations

import pytest
import torch

from kernels.fp8_cache import DTYPE, LARGEST, quantise
from kernels.kv_blocks import write_kv_rows
from kernels.paged_attention import paged_attention, write_kv
from kernels.paged_decode import paged_decode

LAYERS, LAYER = 2, 1


def test_quantise_cuts_off_large_numbers_and_rounds_to_three_bits() -> None:
    x = torch.tensor([1e9, -1e9, 0.0, 1.19, -7.3]).view(1, 1, 5)
    assert quantise(x, torch.tensor([1.0])).float().flatten().tolist() == [LARGEST, -LARGEST, 0.0, 1.25, -7.5]
    smaller = quantise(x, torch.tensor([4.0])).float().flatten().tolist()
    assert smaller == [LARGEST, -LARGEST, 0.0, 0.3125, -1.875]


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim", "block_size"), [(6, 3, 40, 16), (5, 1, 8, 7)])
def test_attention_over_fp8_equals_attention_over_dequantised(
    heads: int, kv_heads: int, head_dim: int, block_size: int, window: int | None
) -> None:
    torch.manual_seed(1)
    tokens = 2 * block_size + 3
    scales = torch.rand(LAYERS, 2, kv_heads) * 0.1 + 0.01
    empty = torch.full((9, LAYERS, 2, kv_heads, head_dim * block_size), torch.nan)
    cache, table = empty.to(DTYPE), torch.tensor([7, 2, 5])
    k, v = (torch.randn(tokens, kv_heads, head_dim) for _ in range(2))
    write_kv(cache, LAYER, table, 0, k[:-1], v[:-1], scales)
    last = torch.tensor([tokens - 1])
    write_kv_rows(cache, LAYER, table[last // block_size], last % block_size, k[-1:], v[-1:], scales)

    meant = empty.clone()
    for part, numbers in enumerate((k, v)):
        kept = quantise(numbers, scales[LAYER, part]).float() * scales[LAYER, part][:, None]
        assert float((kept - numbers).norm() / numbers.norm()) < 0.04
        both = [kept, kept]
        spare = empty.clone()
        write_kv(spare, LAYER, table, 0, *both)
        meant[:, LAYER, part] = spare[:, LAYER, part]
    q = torch.randn(tokens, heads, head_dim)
    expected = paged_attention(q, meant, LAYER, table, 0, window)
    torch.testing.assert_close(paged_attention(q, cache, LAYER, table, 0, window, scales), expected)
    lengths = last + 1
    got = paged_decode(q[-1:], cache, LAYER, table[None], lengths, window, scales)
    torch.testing.assert_close(got, expected[-1:], atol=1e-5, rtol=1e-5)
