"""Attention over paged latents equals attention over the keys and values that they stand for."""

from __future__ import annotations

import torch

from kernels.latent_attention import latent_attention, latent_decode, write_latents

HEADS, RANK, ROPE, NOPE, VALUE, BLOCK = 3, 20, 6, 10, 7, 4
WIDTH = RANK + ROPE
LENGTH = 11
SCALE = 0.21


def memory() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return blocks whose unwritten lanes are NaN, the latents of one sequence, and its table."""
    generator = torch.Generator().manual_seed(2)
    latents = torch.randn(LENGTH, WIDTH, generator=generator)
    blocks = torch.full((6, 2, 1, 1, BLOCK * WIDTH), torch.nan)
    table = torch.tensor([4, 0, 5])
    at = torch.arange(LENGTH)
    write_latents(blocks, 1, table[at // BLOCK], at % BLOCK, latents)
    return blocks, latents, table


def test_absorbed_queries_equal_keys_and_values_of_each_head() -> None:
    blocks, latents, table = memory()
    generator = torch.Generator().manual_seed(3)
    keys_of = torch.randn(HEADS, NOPE, RANK, generator=generator)
    values_of = torch.randn(HEADS, VALUE, RANK, generator=generator)
    plain = torch.randn(LENGTH, HEADS, NOPE, generator=generator)
    rotated = torch.randn(LENGTH, HEADS, ROPE, generator=generator)
    keys = torch.cat(
        [
            torch.einsum("tr,hnr->thn", latents[:, :RANK], keys_of),
            latents[:, None, RANK:].expand(-1, HEADS, -1),
        ],
        dim=-1,
    )
    values = torch.einsum("tr,hvr->thv", latents[:, :RANK], values_of)
    scores = torch.einsum("qhd,khd->hqk", torch.cat([plain, rotated], dim=-1), keys) * SCALE
    scores += torch.full((LENGTH, LENGTH), -torch.inf).triu(1)
    expected = torch.einsum("hqk,khv->qhv", scores.softmax(dim=-1), values)

    query = torch.cat([torch.einsum("thn,hnr->thr", plain, keys_of), rotated], dim=-1)
    mixed = latent_attention(query, blocks, 1, table, 0, rank=RANK, scale=SCALE)
    got = torch.einsum("thr,hvr->thv", mixed, values_of)
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)


def test_chunks_and_decode_rows_equal_the_whole() -> None:
    blocks, _, table = memory()
    query = torch.randn(LENGTH, HEADS, WIDTH, generator=torch.Generator().manual_seed(4))
    whole = latent_attention(query, blocks, 1, table, 0, rank=RANK, scale=SCALE)
    rest = latent_attention(query[6:], blocks, 1, table, 6, rank=RANK, scale=SCALE)
    torch.testing.assert_close(rest, whole[6:], atol=1e-6, rtol=1e-6)
    lengths = torch.tensor([1, 5, LENGTH])
    # Short tables are padded with a block that holds NaN only.
    tables = torch.stack([torch.tensor([4, 1, 1]), torch.tensor([4, 0, 1]), table])
    rows = latent_decode(query[lengths - 1], blocks, 1, tables, lengths, rank=RANK, scale=SCALE)
    torch.testing.assert_close(rows, whole[lengths - 1], atol=1e-6, rtol=1e-6)


def test_latents_of_one_layer_leave_the_other_alone() -> None:
    blocks, latents, table = memory()
    assert blocks[:, 0].isnan().all()
    first = blocks[table[0], 1, 0].view(BLOCK, WIDTH)
    assert torch.equal(first, latents[:BLOCK])
