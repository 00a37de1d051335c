"""Decode attention with products of FP8 equals its meaning, and 16-bit attention as far as FP8 goes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kernels.fp8_attention import fp8_decode
from kernels.fp8_cache import DTYPE
from kernels.gpu.decode_splits import SHORT_SPLIT
from kernels.gpu.fp8_decode import lacks_fp8_decode
from kernels.gpu.paged_decode import paged_decode
from kernels.gpu.tuning import decode_default
from tests.kernels.gpu.paged import LAYER, LAYERS, Heads, error, paged

HEADS = Heads(6, 2, 64, 16)
TILE = dict(decode_default(64, 1, 16))["tile"]
CLOSE, FAR = 2e-3, 1e-2
"""Bounds of `error`: of the same tiles, where scores that differ in a last place may round a weight the other
way, and of what is wrong."""
ROUNDING = 0.06
"""Bound of `error` from products of float32: three places of queries and weights."""


@pytest.fixture(autouse=True)
def card(device: torch.device) -> None:
    if (why := lacks_fp8_decode(device, HEADS.head_dim)) is not None:
        pytest.skip(why)


@pytest.mark.parametrize("rule", [{}, {"window": 30}, {"cap": 9.0, "sinks": True}, {"scale": 0.3}], ids=str)
def test_decode_in_fp8_equals_its_meaning(rule: dict[str, Any], device: torch.device) -> None:
    torch.manual_seed(1)
    lengths = [1, 40, 0, 2 * SHORT_SPLIT + 9]
    plain = paged(HEADS, lengths, torch.float32, device)
    scales = torch.rand(LAYERS, 2, HEADS.kv_heads, device=device) * 0.1 + 0.01
    blocks = (plain.blocks / scales[None, :, :, :, None]).clamp(-448, 448).to(DTYPE)
    query = torch.randn(len(lengths), HEADS.heads, HEADS.head_dim, device=device)
    query *= torch.rand(len(lengths), HEADS.heads, 1, device=device) + 0.01
    how: dict[str, Any] = {"window": None, **rule, "scales": scales}
    if rule.get("sinks"):
        how["sinks"] = torch.randn(HEADS.heads, device=device)
    at = torch.tensor(lengths, dtype=torch.int32, device=device)

    def run(tables: torch.Tensor, **more: Any) -> torch.Tensor:
        return paged_decode(query, blocks, LAYER, tables, at, **how, **more)

    got = run(plain.tables, eight=True)
    expected = fp8_decode(
        query, blocks, LAYER, plain.tables.long(), at, tile=TILE, split=lambda tokens: SHORT_SPLIT, **how
    )
    assert (got[2] == 0).all()
    assert error(got, expected) < CLOSE
    assert 1e-3 < error(got, run(plain.tables)) < ROUNDING
    assert error(run(plain.tables.flip(0).contiguous(), eight=True), expected) > FAR
    alone = paged_decode(query[3:].clone(), blocks, LAYER, plain.tables[3:], at[3:], **how, eight=True)
    assert torch.equal(alone[0], got[3])
