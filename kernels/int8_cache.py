"""KV cache in int8 with a scale for each token and head.

Of one layer, its keys or values, and one KV head a block holds int8 codes `[head_dim, block_size]` (keys)
or `[block_size, head_dim]` (values), padding to a multiple of four bytes, and float32 scales `[block_size]`.
What is meant is the code times its token's scale. A scale is a 127th of the head's greatest number, so that a
token has the same codes whatever lies beside it, and a block is whole without anything outside of it.
"""

from __future__ import annotations

import torch

DTYPE = torch.int8
LARGEST = 127.0
_SCALE_BYTES = 4


def head_bytes(head_dim: int, block_size: int) -> int:
    """Return the bytes of one head's keys, or values, in one block."""
    return _codes_end(head_dim, block_size) + _SCALE_BYTES * block_size


def tokens_of(nbytes: int, head_dim: int) -> int:
    """Return the tokens of a block whose heads have `nbytes` each, as `head_bytes` counts them."""
    return nbytes // (head_dim + _SCALE_BYTES)  # padding is less than a token


def quantise(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise `x [tokens, kv_heads, head_dim]` to int8 of -127 .. 127 and scales `[tokens, kv_heads]`.

    Scales are float32, ties go to even. A head with a number that is not finite has the scale NaN, and zeros.
    """
    numbers = x.float()
    scales = numbers.abs().amax(dim=-1) / LARGEST
    scales = torch.where(numbers.isfinite().all(dim=-1), scales, torch.nan)
    codes = (numbers / scales.unsqueeze(-1)).round().clamp(-LARGEST, LARGEST)
    return torch.where((scales > 0).unsqueeze(-1), codes, 0.0).to(DTYPE), scales


def key_views(heads: torch.Tensor, head_dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """View the keys `heads [..., bytes]`: codes `[..., head_dim, block_size]` and their scales.

    Scales are float32 `[..., block_size]`.
    """
    codes, scales = _views(heads, head_dim)
    return codes.unflatten(-1, (head_dim, -1)), scales


def value_views(heads: torch.Tensor, head_dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """View the values `heads [..., bytes]`: codes `[..., block_size, head_dim]` and their scales."""
    codes, scales = _views(heads, head_dim)
    return codes.unflatten(-1, (-1, head_dim)), scales


def _views(heads: torch.Tensor, head_dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    size = tokens_of(heads.shape[-1], head_dim)
    return heads[..., : head_dim * size], heads[..., _codes_end(head_dim, size) :].view(torch.float32)


def _codes_end(head_dim: int, block_size: int) -> int:
    return -(-head_dim * block_size // _SCALE_BYTES) * _SCALE_BYTES
