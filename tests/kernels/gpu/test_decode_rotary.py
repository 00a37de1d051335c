"""Decode attention that rotates and writes new tokens itself equals the two launches that it stands for."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from kernels.gpu.decode_rotary import FreshRows
from kernels.gpu.decode_splits import SHORT_SPLIT
from kernels.gpu.paged_decode import paged_decode
from kernels.gpu.rotary_write import rotary_write
from tests.kernels.gpu.paged import LAYER, LAYERS, Heads, error, paged

LENGTHS = [1, SHORT_SPLIT + 1, 0, 16]


def fresh_rows(heads: Heads, lengths: list[int], tables: torch.Tensor, dtype: torch.dtype) -> FreshRows:
    rows, device = len(lengths), tables.device
    at = torch.tensor(lengths, device=device) - 1
    blocks = tables.gather(1, (at.clamp(min=0) // heads.block_size)[:, None])[:, 0].long()
    angle = torch.rand(rows, heads.head_dim // 2, device=device) * 6
    return FreshRows(
        torch.randn(rows, heads.heads + 2 * heads.kv_heads, heads.head_dim, device=device).to(dtype),
        angle.cos(),
        angle.sin(),
        torch.where(at >= 0, blocks, -1),
        (at.clamp(min=0) % heads.block_size).int(),
        (torch.rand(heads.head_dim, device=device) + 0.5).to(dtype),
        (torch.rand(heads.head_dim, device=device) + 0.5).to(dtype),
        eps=1e-6,
    )


@pytest.mark.parametrize(
    ("heads", "dtype", "kind", "window"),
    [
        (Heads(9, 3, 64, 16), torch.float32, "norm", None),
        (Heads(4, 2, 80, 16), torch.float32, "late", 20),
        (Heads(4, 2, 64, 16), torch.bfloat16, "plain", None),
        (Heads(4, 2, 64, 16), torch.float32, "still", None),
        (Heads(4, 2, 64, 16), torch.float32, "fp8", None),
    ],
    ids=str,
)
def test_new_tokens_are_rotated_and_written(
    heads: Heads, dtype: torch.dtype, kind: str, window: int | None, device: torch.device
) -> None:
    torch.manual_seed(1)
    memory = paged(heads, LENGTHS, torch.float32, device)
    scales = torch.rand(LAYERS, 2, heads.kv_heads, device=device) + 0.5 if kind == "fp8" else None
    kept = memory.blocks.nan_to_num(7.0).to(torch.float8_e4m3fn if scales is not None else dtype)
    fresh = replace(fresh_rows(heads, LENGTHS, memory.tables, dtype), norm_late=kind == "late")
    if kind not in ("norm", "late"):
        fresh = replace(fresh, q_norm=None, k_norm=None)
    if kind == "still":
        fresh = replace(fresh, cos=None, sin=None)
    at = torch.tensor(LENGTHS, dtype=torch.int32, device=device)
    rule: dict[str, Any] = {"window": window, "scales": scales}
    apart, own = kept.clone(), kept.clone()
    queries = rotary_write(
        fresh.qkv, fresh.cos, fresh.sin, apart, LAYER, fresh.block_ids, fresh.lanes, heads=heads.heads,
        kv_heads=heads.kv_heads, q_norm=fresh.q_norm, k_norm=fresh.k_norm, norm_late=fresh.norm_late,
        eps=fresh.eps, scales=scales,
    )  # fmt: skip
    expected = paged_decode(queries, apart, LAYER, memory.tables, at, **rule)
    room = torch.full_like(queries, 1e4)
    got = paged_decode(room, own, LAYER, memory.tables, at, **rule, fresh=fresh)
    close = 2e-6 if dtype == torch.float32 and scales is None else 1.2e-2
    assert error(got, expected) < close
    changed = (own.float() != kept.float()).float().sum()
    assert 0 < changed <= 2 * 3 * heads.kv_heads * heads.head_dim, "three tokens of one layer"
    assert error(own.float(), apart.float()) < close
    other = replace(fresh, block_ids=torch.full_like(fresh.block_ids, -1))
    untouched = kept.clone()
    aborted = paged_decode(room, untouched, LAYER, memory.tables, at, **rule, fresh=other)
    assert torch.equal(untouched.float(), kept.float()), "aborted rows write nothing"
    assert error(aborted, expected) > 10 * close
