"""rotary_write against norms, rotary embedding and the write of keys and values one by one."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kernels.gpu.rotary_write import rotary_write
from kernels.kv_blocks import write_kv_rows
from kernels.rms_norm import rms_norm
from kernels.rotary import rotary
from tests.kernels.gpu.paged import DTYPES, LAYER, LAYERS, ODD_HEADS, TOLERANCE, Heads, error

SMALL = Heads(4, 2, 64, 16)


class Case:
    """Random inputs, and what the single operators make of them."""

    def __init__(
        self, heads: Heads, tokens: int, dtype: torch.dtype, device: torch.device, *, norm: bool
    ) -> None:
        self.heads, width, half = heads, heads.heads + 2 * heads.kv_heads, heads.head_dim // 2
        self.qkv = torch.randn(tokens, width, heads.head_dim, device=device).to(dtype)
        angles = torch.rand(tokens, half, device=device) * 6
        self.cos, self.sin = angles.cos().to(dtype), angles.sin().to(dtype)
        count = tokens // heads.block_size + 2
        shape = (count, LAYERS, 2, heads.kv_heads, heads.head_dim * heads.block_size)
        self.blocks = torch.full(shape, 7.0, device=device, dtype=dtype)
        places = torch.randperm(count * heads.block_size, device=device)[:tokens]
        self.block_ids, self.lanes = places // heads.block_size, (places % heads.block_size).int()
        self.norms = None
        if norm:
            first, second = (torch.rand(heads.head_dim, device=device).to(dtype) + 0.5 for _ in range(2))
            self.norms = (first, second)

    def expected(self, *, rotate: bool = True, late: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the queries, and the blocks with keys and values in them; padding rows leave them alone."""
        heads, blocks = self.heads, self.blocks.clone()
        q, k, v = self.qkv.split([heads.heads, heads.kv_heads, heads.kv_heads], dim=1)
        if self.norms is not None and not late:
            q, k = rms_norm(q, self.norms[0], 1e-6), rms_norm(k, self.norms[1], 1e-6)
        if rotate:
            q, k = rotary(q, self.cos, self.sin), rotary(k, self.cos, self.sin)
        if self.norms is not None and late:
            q, k = rms_norm(q, self.norms[0], 1e-6), rms_norm(k, self.norms[1], 1e-6)
        kept = self.block_ids >= 0
        write_kv_rows(blocks, LAYER, self.block_ids[kept], self.lanes[kept].long(), k[kept], v[kept])
        return q, blocks

    def run(self, blocks: torch.Tensor, *, rotate: bool = True, **kwargs: Any) -> torch.Tensor:
        q_norm, k_norm = self.norms or (None, None)
        return rotary_write(
            self.qkv,
            self.cos if rotate else None,
            self.sin if rotate else None,
            blocks,
            LAYER,
            self.block_ids,
            self.lanes,
            heads=self.heads.heads,
            kv_heads=self.heads.kv_heads,
            q_norm=q_norm,
            k_norm=k_norm,
            eps=1e-6,
            **kwargs,
        )


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("heads", ODD_HEADS, ids=str)
def test_rotary_write_equals_the_single_operators(heads: Heads, norm: bool, device: torch.device) -> None:
    torch.manual_seed(1)
    case = Case(heads, 19, torch.float32, device, norm=norm)
    case.block_ids[3] = case.block_ids[18] = -1
    q, blocks = case.expected()
    assert error(case.run(case.blocks), q) < 1e-6
    assert error(case.blocks, blocks) < 1e-6
    assert torch.equal(case.blocks == 7.0, blocks == 7.0), "nothing else is written"


@pytest.mark.parametrize(("rotate", "late"), [(False, False), (True, True), (False, True)])
def test_norms_may_follow_the_rotation_and_it_may_be_left_out(
    rotate: bool, late: bool, device: torch.device
) -> None:
    torch.manual_seed(4)
    case = Case(ODD_HEADS[1], 19, torch.float32, device, norm=True)
    q, blocks = case.expected(rotate=rotate, late=late)
    assert error(case.run(case.blocks, rotate=rotate, norm_late=late), q) < 1e-6
    assert error(case.blocks, blocks) < 1e-6


def test_float32_norms_multiply_before_they_are_rounded(device: torch.device) -> None:
    torch.manual_seed(5)
    case = Case(SMALL, 9, torch.bfloat16, device, norm=True)
    assert case.norms is not None
    case.norms = (case.norms[0].float() * 1.0007, case.norms[1].float() * 1.0007)
    q, blocks = case.expected()
    assert error(case.run(case.blocks), q) < TOLERANCE[torch.bfloat16]
    assert error(case.blocks, blocks) < TOLERANCE[torch.bfloat16]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens", [1, 35])
def test_rotary_write_rounds_once(dtype: torch.dtype, tokens: int, device: torch.device) -> None:
    torch.manual_seed(2)
    case = Case(SMALL, tokens, dtype, device, norm=True)
    q, blocks = case.expected()
    out = torch.full_like(q, torch.nan)
    assert case.run(case.blocks, out=out) is out
    assert error(out, q) < TOLERANCE[dtype]
    assert error(case.blocks, blocks) < TOLERANCE[dtype]


def test_fp8_is_divided_by_the_scale_of_its_head_and_cut_off(device: torch.device) -> None:
    torch.manual_seed(3)
    case = Case(SMALL, 20, torch.float32, device, norm=False)
    case.qkv[0] *= 1e4
    _, blocks = case.expected()
    scales = torch.rand(LAYERS, 2, SMALL.kv_heads, device=device) * 0.1 + 0.01
    stored = torch.zeros_like(case.blocks).to(torch.float8_e4m3fn)
    case.run(stored, scales=scales)
    written = blocks != 7.0
    meant = (blocks / scales[None, :, :, :, None]).clamp(-448, 448).to(torch.float8_e4m3fn)
    same = stored.view(torch.uint8)[written] == meant.view(torch.uint8)[written]
    # A product and sum in another order may lie on the other side of a border between two numbers.
    assert same.float().mean() > 0.99
    assert error(stored.float()[written], meant.float()[written]) < 0.01
    assert (stored.float()[~written] == 0).all()
    assert (stored.float()[written].abs() == 448).any()


def test_one_norm_alone_is_refused(device: torch.device) -> None:
    case = Case(SMALL, 1, torch.float32, device, norm=False)
    with pytest.raises(ValueError, match="both"):
        rotary_write(
            case.qkv, case.cos, case.sin, case.blocks, 0, case.block_ids, case.lanes, heads=4, kv_heads=2,
            q_norm=case.cos[0],
        )  # fmt: skip
    with pytest.raises(ValueError, match="cosines and sines"):
        rotary_write(
            case.qkv, case.cos, None, case.blocks, 0, case.block_ids, case.lanes, heads=4, kv_heads=2
        )
