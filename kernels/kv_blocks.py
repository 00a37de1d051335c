"""Keys and values of paged blocks, whatever their number type: how they are written, and what they mean.

`blocks` is a whole KV memory `[num_blocks, layers, 2, kv_heads, n]`: keys as `[head_dim, block_size]`
(transposed), values as `[block_size, head_dim]`, in n numbers each. In int8 the n bytes hold scales, too
(int8_cache.py); in FP8 there are `scales` outside of the blocks (fp8_cache.py).
"""

from __future__ import annotations

import torch

from kernels import fp8_cache, int8_cache


def head_numbers(dtype: torch.dtype, head_dim: int, block_size: int) -> int:
    """Return the numbers of type `dtype` that one head's keys, or values, take in one block."""
    if dtype == int8_cache.DTYPE:
        return int8_cache.head_bytes(head_dim, block_size)
    return head_dim * block_size


def block_tokens(blocks: torch.Tensor, head_dim: int) -> int:
    """Return the tokens of a block."""
    numbers = blocks.shape[-1]
    return int8_cache.tokens_of(numbers, head_dim) if _has_scales(blocks) else numbers // head_dim


def write_kv_rows(
    blocks: torch.Tensor,
    layer: int,
    ids: torch.Tensor,
    lanes: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    scales: torch.Tensor | None = None,
) -> None:
    """Store `keys` and `values [tokens, kv_heads, head_dim]` at block `ids[token]`, lane `lanes[token]`.

    Both are int64. `scales` are those of a cache in FP8.
    """
    head_dim = keys.shape[-1]
    if _has_scales(blocks):
        key_codes, key_scales = int8_cache.key_views(blocks[:, layer, 0], head_dim)
        value_codes, value_scales = int8_cache.value_views(blocks[:, layer, 1], head_dim)
        key_codes[ids, :, :, lanes], key_scales[ids, :, lanes] = int8_cache.quantise(keys)
        value_codes[ids, :, lanes], value_scales[ids, :, lanes] = int8_cache.quantise(values)
        return
    if scales is not None:
        keys = fp8_cache.quantise(keys, scales[layer, 0])
        values = fp8_cache.quantise(values, scales[layer, 1])
    blocks[:, layer, 0].unflatten(-1, (head_dim, -1))[ids, :, :, lanes] = keys.to(blocks.dtype)
    blocks[:, layer, 1].unflatten(-1, (-1, head_dim))[ids, :, lanes] = values.to(blocks.dtype)


def load_keys(
    blocks: torch.Tensor, layer: int, ids: torch.Tensor, head_dim: int, scales: torch.Tensor | None = None
) -> torch.Tensor:
    """Return the keys of the blocks `ids [...]`, float32 `[..., kv_heads, head_dim, block_size]`."""
    heads = blocks[ids, layer, 0]
    if _has_scales(blocks):
        codes, of_tokens = int8_cache.key_views(heads, head_dim)
        return codes.float() * of_tokens.unsqueeze(-2)
    keys: torch.Tensor = heads.unflatten(-1, (head_dim, -1)).float()
    return keys if scales is None else keys * scales[layer, 0, :, None, None]


def load_values(
    blocks: torch.Tensor, layer: int, ids: torch.Tensor, head_dim: int, scales: torch.Tensor | None = None
) -> torch.Tensor:
    """Return the values of the blocks `ids [...]`, float32 `[..., kv_heads, block_size, head_dim]`."""
    heads = blocks[ids, layer, 1]
    if _has_scales(blocks):
        codes, of_tokens = int8_cache.value_views(heads, head_dim)
        return codes.float() * of_tokens.unsqueeze(-1)
    values: torch.Tensor = heads.unflatten(-1, (-1, head_dim)).float()
    return values if scales is None else values * scales[layer, 1, :, None, None]


def token_views(blocks: torch.Tensor, head_dim: int) -> list[torch.Tensor]:
    """View all that blocks hold of their tokens, each `[num_blocks, layers, kv_heads, block_size, ...]`."""
    if _has_scales(blocks):
        key_codes, key_scales = int8_cache.key_views(blocks[:, :, 0], head_dim)
        value_codes, value_scales = int8_cache.value_views(blocks[:, :, 1], head_dim)
        return [key_codes.transpose(-1, -2), key_scales, value_codes, value_scales]
    keys = blocks[:, :, 0].unflatten(-1, (head_dim, -1)).transpose(-1, -2)
    return [keys, blocks[:, :, 1].unflatten(-1, (-1, head_dim))]


def _has_scales(blocks: torch.Tensor) -> bool:
    return blocks.dtype == int8_cache.DTYPE
