"""Keys and values in int8 are codes times the scale of their token and head, at every operator."""

from __future__ import annotations

import pytest
import torch

from kernels.int8_cache import DTYPE, head_bytes, key_views, quantise, tokens_of, value_views
from kernels.kv_blocks import load_keys, load_values, write_kv_rows
from kernels.paged_attention import paged_attention, write_kv
from kernels.paged_decode import paged_decode

LAYERS, LAYER, KV_HEADS = 2, 1, 2


def test_codes_round_to_even_and_reach_127_at_each_heads_peak() -> None:
    head = torch.tensor([[[127.0, -127.0, 0.5, 1.5, -2.5, 3.4999]], [[0.0, 0.0, 0.0, 0.0, 0.0, 0.0]]])
    codes, scales = quantise(head * 3)
    assert codes.tolist() == [[[127, -127, 0, 2, -2, 3]], [[0, 0, 0, 0, 0, 0]]]
    assert scales.tolist() == [[3.0], [0.0]]


@pytest.mark.parametrize("bad", [torch.inf, -torch.inf, torch.nan])
def test_what_is_not_finite_is_a_scale_of_nan_of_its_own_head(bad: float) -> None:
    x = torch.ones(2, 2, 6)
    x[0, 1, 3] = bad
    codes, scales = quantise(x)
    assert scales.isnan().tolist() == [[False, True], [False, False]]
    assert not codes[0, 1].any()


@pytest.mark.parametrize("block_size", [1, 2, 5, 16])
@pytest.mark.parametrize("head_dim", [2, 7, 40, 64])
def test_a_heads_bytes_are_codes_padding_and_scales(head_dim: int, block_size: int) -> None:
    nbytes = head_bytes(head_dim, block_size)
    assert tokens_of(nbytes, head_dim) == block_size
    assert nbytes % 4 == 0
    assert 0 <= nbytes - block_size * (head_dim + 4) < 4
    heads = torch.arange(nbytes).to(torch.uint8).view(DTYPE)
    for views, shape in ((key_views, (head_dim, block_size)), (value_views, (block_size, head_dim))):
        codes, scales = views(heads, head_dim)
        assert codes.shape == shape
        assert torch.equal(codes.flatten(), heads[: head_dim * block_size])
        assert torch.equal(scales, heads[-4 * block_size :].view(torch.float32))


@pytest.mark.parametrize(("head_dim", "block_size"), [(10, 5), (40, 16)])
def test_attention_equals_that_over_rounded_numbers(head_dim: int, block_size: int) -> None:
    """Written as a chunk and as rows, read as a chunk and as a row; swapped scales show."""
    generator = torch.Generator().manual_seed(3)
    tokens = 3 * block_size - 2
    k, v = torch.randn(2, tokens, KV_HEADS, head_dim, generator=generator)
    k *= torch.rand(tokens, KV_HEADS, 1, generator=generator) * 4
    query = torch.randn(tokens, 4, head_dim, generator=generator)
    table = torch.tensor([4, 1, 3])
    cache = torch.full((6, LAYERS, 2, KV_HEADS, head_bytes(head_dim, block_size)), -1, dtype=DTYPE)
    write_kv(cache, LAYER, table, 0, k[:-1], v[:-1])
    last = torch.tensor([tokens - 1])
    write_kv_rows(cache, LAYER, table[last // block_size], last % block_size, k[-1:], v[-1:])
    meant = torch.zeros(6, LAYERS, 2, KV_HEADS, head_dim * block_size)
    rounded = [codes.float() * scales.unsqueeze(-1) for codes, scales in (quantise(k), quantise(v))]
    write_kv(meant, LAYER, table, 0, *rounded)
    expected = paged_attention(query, meant, LAYER, table, 0, 7)
    torch.testing.assert_close(paged_attention(query, cache, LAYER, table, 0, 7), expected)
    decoded = paged_decode(query[-1:], cache, LAYER, table.unsqueeze(0), torch.tensor([tokens]), 7)
    torch.testing.assert_close(decoded, expected[-1:])
    first = load_keys(cache, LAYER, table, head_dim)[0, 0, :, 0]
    assert ((first - k[0, 0]).abs() <= k[0, 0].abs().max() / 253).all()
    assert load_values(cache, LAYER, table, head_dim).shape == (3, KV_HEADS, block_size, head_dim)
    _, scales = key_views(cache[:, LAYER, 0], head_dim)
    scales[1] = scales[1].flip(-1)
    assert (paged_attention(query, cache, LAYER, table, 0, 7) - expected).abs().max() > 0.01
