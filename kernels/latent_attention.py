"""Attention over latents in paged blocks, and their write (DeepSeek-V2 report, 2024: multi-head latent
attention).

A token keeps one vector for all heads: `rank` numbers that keys and values are made from, and the rotated
lanes of its key. Queries come with the keys' matrix multiplied into them, so that a score is one product with
what is kept, and the values are its first `rank` numbers.

`blocks` is a whole KV memory `[num_blocks, layers, 1, 1, block_size * width]`, in a block `[block_size,
width]`. Position p of a sequence lies in block `table[p // block_size]`, lane `p % block_size`.
"""

from __future__ import annotations

import torch


def write_latents(
    blocks: torch.Tensor, layer: int, ids: torch.Tensor, lanes: torch.Tensor, latents: torch.Tensor
) -> None:
    """Store `latents [tokens, width]` at block `ids[token]`, lane `lanes[token]` (int64 both)."""
    block_size = blocks.shape[-1] // latents.shape[-1]
    kept = blocks[:, layer, 0].view(len(blocks), block_size, latents.shape[-1])
    kept[ids, lanes] = latents.to(blocks.dtype)


def latent_attention(
    query: torch.Tensor,
    blocks: torch.Tensor,
    layer: int,
    table: torch.Tensor,
    start: int,
    *,
    rank: int,
    scale: float,
) -> torch.Tensor:
    """Compute causal attention of `query [tokens, heads, width]` at positions `start, start + 1, ...`.

    All tokens are of one sequence; its latents, up to the last query's, are in `blocks` by `table [n]`
    (int64). `scale` multiplies scores. Scores and sums are float32. Returns `[tokens, heads, rank]`.
    """
    tokens, heads, width = query.shape
    block_size = blocks.shape[-1] // width
    end = start + tokens
    ids = table[: -(-end // block_size)]
    latents = blocks[ids, layer, 0].view(-1, width)[:end].float()
    scores = (query.float().view(tokens * heads, width) @ latents.T).view(tokens, heads, end) * scale
    at = torch.arange(start, end).view(-1, 1, 1)
    scores.masked_fill_(torch.arange(end) > at, -torch.inf)
    weights = torch.softmax(scores, dim=-1).view(tokens * heads, end)
    return (weights @ latents[:, :rank]).view(tokens, heads, rank).to(query.dtype)


def latent_decode(
    query: torch.Tensor,
    blocks: torch.Tensor,
    layer: int,
    tables: torch.Tensor,
    lengths: torch.Tensor,
    *,
    rank: int,
    scale: float,
) -> torch.Tensor:
    """Compute attention of `query [rows, heads, width]`, row r over the first `lengths[r]` positions.

    `tables` is int64 `[rows, n]`, padded with any valid block: what lies beyond a length is not read into the
    result, whatever it holds. Otherwise as `latent_attention`. Returns `[rows, heads, rank]`.
    """
    rows, heads, width = query.shape
    latents = blocks[tables, layer, 0].view(rows, -1, width).float()
    hidden = torch.arange(latents.shape[1]) >= lengths.unsqueeze(1)
    # Weight zero is not enough where a lane holds NaN: such numbers must go.
    latents.masked_fill_(hidden.unsqueeze(-1), 0.0)
    scores = (query.float() @ latents.transpose(1, 2)) * scale
    scores.masked_fill_(hidden.unsqueeze(1), -torch.inf)
    mixed = torch.softmax(scores, dim=-1) @ latents[..., :rank]
    return mixed.view(rows, heads, rank).to(query.dtype)
