"""Rotary embedding: it turns pairs, keeps lengths, and makes scores depend on distance alone."""

from __future__ import annotations

import torch

from kernels.rotary import rotary

FREQUENCIES = 1.0 / 100.0 ** (torch.arange(20) / 20)


def turned(x: torch.Tensor, positions: list[int]) -> torch.Tensor:
    angles = torch.tensor(positions, dtype=torch.float32).unsqueeze(1) * FREQUENCIES
    return rotary(x, angles.cos(), angles.sin())


def test_rotary_multiplies_pairs_as_complex_numbers() -> None:
    torch.manual_seed(0)
    x = torch.randn(4, 3, 40)
    positions = torch.tensor([0.0, 1.0, 7.0, 300.0])
    turn = torch.polar(torch.ones(4, 1, 20), (positions[:, None] * FREQUENCIES)[:, None])
    expected = torch.complex(x[..., :20], x[..., 20:]) * turn
    got = turned(x, [0, 1, 7, 300])
    torch.testing.assert_close(got[..., :20], expected.real)
    torch.testing.assert_close(got[..., 20:], expected.imag)
    assert got[0].equal(x[0]), "position 0 is not turned"


def test_scores_depend_on_the_distance_alone() -> None:
    torch.manual_seed(1)
    q, k = torch.randn(1, 1, 40), torch.randn(1, 1, 40)
    near = (turned(q, [9]) * turned(k, [4])).sum()
    far = (turned(q, [205]) * turned(k, [200])).sum()
    torch.testing.assert_close(near, far, atol=1e-4, rtol=0)
