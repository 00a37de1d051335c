"""What adapters add to products, on the GPU."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from kernels.adapted_linear import SlotChange
from kernels.adapted_linear import adapted_linear as meaning
from kernels.gpu.adapted_linear import adapted_linear
from kernels.gpu.change_table import ChangeTable
from tests.kernels.gpu.paged import DTYPES, TOLERANCE, error

WIDTHS = (40, 24, 17)
RANKS = ((3, 0, 8), (1, 5, 0), (16, 2, 4))
"""Ranks of each matrix by slot; 0: the slot does not change it."""
SLOTS = [2, -1, 0, 1, 2, 0, -1]


def changes_of(depth: int, dtype: torch.dtype, device: torch.device) -> list[list[SlotChange | None]]:
    """Return random changes of three joined matrices by three slots."""

    def change(width: int, rank: int) -> SlotChange | None:
        if rank == 0:
            return None
        a = torch.randn(rank, depth, device=device).to(dtype)
        b = (torch.randn(width, rank, device=device) * depth**-0.5).to(dtype)
        return SlotChange(a, b, 0.5 + rank / 7)

    return [[change(width, rank) for rank in ranks] for width, ranks in zip(WIDTHS, RANKS, strict=True)]


def table_of(changes: Sequence[Sequence[SlotChange | None]], device: torch.device) -> ChangeTable:
    def numbers(kind: torch.dtype, of: object) -> torch.Tensor:
        assert callable(of)
        rows = [[0 if one is None else of(one) for one in by_slot] for by_slot in changes]
        return torch.tensor(rows, dtype=kind, device=device)

    begins = [sum(WIDTHS[:number]) for number in range(len(WIDTHS))]
    return ChangeTable(
        a=numbers(torch.int64, lambda one: one.a.data_ptr()),
        b=numbers(torch.int64, lambda one: one.b.data_ptr()),
        ranks=numbers(torch.int32, lambda one: len(one.a)),
        scales=numbers(torch.float32, lambda one: one.scale),
        begins=torch.tensor(begins, dtype=torch.int32, device=device),
        widths=torch.tensor(WIDTHS, dtype=torch.int32, device=device),
        widest=max(WIDTHS),
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("depth", [7, 100])
def test_adapted_linear_equals_the_reference(depth: int, dtype: torch.dtype, device: torch.device) -> None:
    torch.manual_seed(0)
    changes = changes_of(depth, dtype, device)
    x = torch.randn(len(SLOTS), depth, device=device).to(dtype)
    base = torch.randn(len(SLOTS), sum(WIDTHS), device=device).to(dtype)
    slots = torch.tensor(SLOTS, dtype=torch.int32, device=device)
    scratch = torch.full((len(SLOTS) * 3 * 16,), torch.nan, device=device)
    got = adapted_linear(x, base.clone(), slots, table_of(changes, device), scratch, 16)
    expected = meaning(x, base.clone(), slots, changes)
    assert error(got, expected) < TOLERANCE[dtype]
    assert torch.equal(got[slots < 0], base[slots < 0])
    swapped = slots.clone()
    swapped[slots == 0], swapped[slots == 2] = 2, 0
    other = adapted_linear(x, base.clone(), swapped, table_of(changes, device), scratch, 16)
    assert error(other, expected) > 0.3, "adapters of other slots should show"


def test_a_row_has_the_same_bits_alone(device: torch.device) -> None:
    torch.manual_seed(1)
    changes = changes_of(100, torch.float32, device)
    table = table_of(changes, device)
    x = torch.randn(len(SLOTS), 100, device=device)
    base = torch.randn(len(SLOTS), sum(WIDTHS), device=device)
    slots = torch.tensor(SLOTS, dtype=torch.int32, device=device)
    scratch = torch.empty(len(SLOTS) * 3 * 16, device=device)
    together = adapted_linear(x, base.clone(), slots, table, scratch, 16)
    for row in range(len(SLOTS)):
        one = slice(row, row + 1)
        alone = adapted_linear(x[one].clone(), base[one].clone(), slots[one].clone(), table, scratch, 16)
        assert torch.equal(alone[0], together[row])


def test_no_rows_are_nothing(device: torch.device) -> None:
    table = table_of(changes_of(7, torch.float32, device), device)
    slots = torch.empty(0, dtype=torch.int32, device=device)
    out = torch.empty((0, sum(WIDTHS)), device=device)
    assert adapted_linear(torch.empty((0, 7), device=device), out, slots, table, out.flatten(), 16) is out
