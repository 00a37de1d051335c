"""Norms and activations that round their rows: the bits of the two launches that they stand for."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kernels.gpu.norm_round import norm_round
from kernels.gpu.rms_norm import add_rms_norm, rms_norm
from kernels.gpu.round_rows import round_rows
from kernels.gpu.swiglu import ACTIVATIONS, swiglu
from kernels.gpu.swiglu_round import swiglu_round
from kernels.scaled_matrix import FP8, INT8

Rounded = tuple[torch.Tensor, torch.Tensor]
WAYS: dict[str, dict[str, Any]] = {
    "fp8": {"dtype": FP8},
    "fp8, squares": {"dtype": FP8, "squares": True},
    "fp8, a fixed scale": {"dtype": FP8, "static": torch.tensor([0.01])},
    "int8": {"dtype": INT8},
}


def how_of(name: str, device: torch.device) -> dict[str, Any]:
    return {
        key: value.to(device) if isinstance(value, torch.Tensor) else value
        for key, value in WAYS[name].items()
    }


def same(got: Rounded, expected: Rounded) -> bool:
    assert got[1].stride() == expected[1].stride()
    return torch.equal(got[0].float(), expected[0].float()) and torch.equal(got[1], expected[1])


@pytest.mark.parametrize("name", WAYS)
@pytest.mark.parametrize("columns", [40, 577, 1024])
def test_a_rounded_norm_has_the_bits_of_norm_and_rounding(
    name: str, columns: int, device: torch.device
) -> None:
    torch.manual_seed(columns)
    how = how_of(name, device)
    x, residual = (torch.randn(5, columns, device=device).bfloat16() for _ in range(2))
    for weight in (torch.rand(columns, device=device).bfloat16(), torch.rand(columns, device=device)):
        expected = round_rows(rms_norm(x, weight, 1e-5), **how)
        assert same(norm_round(x, weight, 1e-5, **how), expected)
        mine, theirs = residual.clone(), residual.clone()
        added = round_rows(add_rms_norm(x, theirs, weight, 1e-5), **how)
        assert same(norm_round(x, weight, 1e-5, residual=mine, **how), added)
        assert torch.equal(mine, theirs)
        assert not torch.equal(mine, residual), "the check could not fail"
        assert not same(added, expected), "the check could not fail"


@pytest.mark.parametrize("name", WAYS)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_a_rounded_activation_has_the_bits_of_activation_and_rounding(
    name: str, activation: str, device: torch.device
) -> None:
    torch.manual_seed(1)
    how, other = how_of(name, device), next(one for one in ACTIVATIONS if one != activation)
    for columns in (72, 2500):
        gate_up = torch.randn(3, 2 * columns, device=device).bfloat16()
        expected = round_rows(swiglu(gate_up, activation=activation, limit=1.3), **how)
        assert same(swiglu_round(gate_up, activation=activation, limit=1.3, **how), expected)
        assert not same(swiglu_round(gate_up, activation=other, limit=1.3, **how), expected)


def test_no_rows_are_rounded_to_none(device: torch.device) -> None:
    none = torch.empty(0, 64, device=device)
    assert norm_round(none, none.new_ones(64), 1e-5, FP8)[0].shape == (0, 64)
    assert swiglu_round(none, FP8)[0].shape == (0, 32)
