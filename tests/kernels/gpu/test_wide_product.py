"""Operands of recurrences in models of 16 bits are rounded to TF32, to the nearest, and no further."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import triton
import triton.language as tl

from kernels.gpu.state_space import state_space
from kernels.gpu.wide_product import operand_precision, to_tf32
from tests.kernels.gpu.paged_states import Pages
from tests.kernels.gpu.recurrence_inputs import space_constants, space_inputs


@triton.jit
def _round(x, out, COUNT: tl.constexpr):
    at = tl.arange(0, COUNT)
    tl.store(out + at, to_tf32(tl.load(x + at)))


def test_numbers_are_rounded_to_the_nearest_of_ten_bits(device: torch.device) -> None:
    x = torch.randn(1024, generator=torch.Generator().manual_seed(1)).to(device)
    x[:4] = torch.tensor([0.0, 1.0, 1 + 2.0**-10, 1 + 3 * 2.0**-12])
    found = torch.empty_like(x)
    _round[(1,)](x, found, COUNT=1024)
    assert found[:4].tolist() == [0.0, 1.0, 1 + 2.0**-10, 1 + 2.0**-10]
    assert ((found.view(torch.int32) & 0x1FFF) == 0).all()
    error = ((found - x) / x.abs().clamp(min=1e-9)).abs()
    assert 2.0**-12 < error.max() <= 2.0**-11


def test_what_is_not_finite_stays_so(device: torch.device) -> None:
    """Whichever NaN it is: 0x7FFFFFFF is what a card computes."""
    bits = [0x7FFFFFFF, -1, 0x7FC00000, 0x7F800001, 0x7F800000, -0x800000, 0x3F800000, 0]
    x = torch.tensor(bits, dtype=torch.int32).view(torch.float32).to(device)
    found = torch.empty_like(x)
    _round[(1,)](x, found, COUNT=len(bits))
    assert found[:4].isnan().all()
    assert found[4:].tolist() == [torch.inf, -torch.inf, 1.0, 0.0]


def test_states_are_as_far_from_float32_as_rounded_operands_take_them(device: torch.device) -> None:
    rule = space_constants(2, 16, 1, 32, device)
    conv, mixed = space_inputs(rule, 70, device, torch.bfloat16)
    states = []
    for dtype in (torch.float32, torch.bfloat16):
        pages = Pages.make(1, 2 * 16 * 32, 0, 64, device)
        runs = pages.chunks([(-1, [(70, 0)])])
        out = torch.empty(70, 32, device=device, dtype=dtype)
        state_space(conv.clone(), mixed.to(dtype), replace(rule), runs, 0, out=out)
        states.append(pages.page(0, 1024))
    exact, got = states
    assert 3e-5 < (got - exact).norm() / exact.norm() < 8e-4


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_models_of_float32_are_not_rounded(dtype: torch.dtype) -> None:
    assert operand_precision(torch.float32) == "tf32x3"
    assert operand_precision(dtype) == "tf32"
