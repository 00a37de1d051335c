"""Experts' products in packed codes equal a loop over rows with the codes' numbers, whatever was chosen."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.nn import functional

from kernels.gpu.expert_linear import sum_experts
from kernels.gpu.packed_experts import FEW_ROWS, packed_expert_linear, packed_expert_swiglu
from kernels.gpu.packed_product import many_tile
from kernels.gpu.route_experts import RoutedRows, route_experts
from kernels.packed_matrix import Code, PackedMatrix, from_blocks
from kernels.packed_stack import PackedStack, dequantise, stack
from kernels.quantised_linear import BlockMatrix
from kernels.scaled_matrix import FP8, ScaledMatrix, quantise
from kernels.swiglu import clamped_swiglu, swiglu
from tests.forms import sampled
from tests.kernels.gpu.paged import error
from tests.kernels.test_packed_matrix import drawn

MANY = ("4 bits with zeros", "MXFP4")
"""Kinds whose rows are also many: the walk along codes is the same function for few and many."""
COUNT, CHOSEN, HIDDEN, INNER = 5, 2, 96, 64


def codes(rows: int, columns: int, group: int, code: Code = "int4", *, zeros: bool = True) -> PackedMatrix:
    return drawn(rows, columns, group, code, zeros=zeros)[0]


def mxfp4(rows: int, columns: int) -> PackedMatrix:
    blocks = torch.randint(0, 256, (rows, columns // 32, 17), dtype=torch.uint8)
    blocks[..., 0] = torch.randint(118, 124, blocks.shape[:2], dtype=torch.uint8)
    found = from_blocks(BlockMatrix("mxfp4", columns, blocks.flatten(1)))
    assert found is not None
    return found


def squares(rows: int, columns: int) -> ScaledMatrix:
    scales = torch.rand(-(-rows // 128), -(-columns // 128)) * 0.1
    return ScaledMatrix(torch.randn(rows, columns).to(FP8), scales, squares=True)


KINDS: dict[str, Any] = {
    "4 bits with zeros": lambda rows, columns: codes(rows, columns, 32),
    "4 bits, one group": lambda rows, columns: codes(rows, columns, columns, zeros=False),
    "table": lambda rows, columns: codes(rows, columns, 32, "table4", zeros=False),
    "8 bits": lambda rows, columns: codes(rows, columns, 32, "int8"),
    "MXFP4": mxfp4,
    "FP8, a scale an output": lambda rows, columns: quantise(torch.randn(rows, columns), FP8),
    "FP8, squares": squares,
}


def experts_of(kind: str, inner: int = INNER) -> tuple[PackedStack, PackedStack]:
    """Return gates and ups, and downs, that differ from expert to expert."""
    torch.manual_seed(3)
    size = 0.05 if kind == "8 bits" else 1.0
    made = [[KINDS[kind](inner, HIDDEN) for _ in range(2)] for _ in range(COUNT)]
    downs = [[KINDS[kind](HIDDEN, inner)] for _ in range(COUNT)]
    for found in (made, downs):
        for number, own in enumerate(found):
            own[:] = [replace(one, scales=one.scales * size * (1 + number / 7)) for one in own]
    return stack(made), stack(downs)


def numbers(*sizes: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(sizes, generator=torch.Generator().manual_seed(seed))


def routing(x: torch.Tensor, seed: int = 2) -> RoutedRows:
    """Route rows of which none chooses expert 3."""
    bias = torch.zeros(COUNT)
    bias[3] = -1e9
    router = numbers(COUNT, HIDDEN, seed=seed)
    return route_experts(x, router.to(x.device), bias.to(x.device), count=CHOSEN)


def by_kernel(
    x: torch.Tensor,
    gate_up: PackedStack,
    down: PackedStack,
    biases: list[Any],
    routed: RoutedRows,
    **how: Any,
) -> torch.Tensor:
    inner = packed_expert_swiglu(x, gate_up, biases[0], routed, **how)
    return sum_experts(packed_expert_linear(inner, down, biases[1], routed), routed)


def by_loop(
    x: torch.Tensor, gate_up: PackedStack, down: PackedStack, biases: list[Any], routed: RoutedRows,
    limit: float | None,
) -> torch.Tensor:  # fmt: skip
    """Sum each row's experts in float32, their numbers rounded to the type of `x`."""
    first, second = (dequantise(one).to(x.dtype).float() for one in (gate_up, down))
    out = torch.zeros(x.shape)
    wide = [None if bias is None else bias.float() for bias in biases]
    for row in range(len(x)):
        for expert, weight in zip(routed.experts[row].tolist(), routed.weights[row].tolist(), strict=True):
            bias = [None if one is None else one[expert] for one in wide]
            both = functional.linear(x[row].float(), first[expert], bias[0])
            act = swiglu(both) if limit is None else clamped_swiglu(both, limit)
            out[row] += weight * functional.linear(act, second[expert], bias[1])
    return out


def moved(routed: RoutedRows, device: torch.device) -> RoutedRows:
    tensors = {name: value for name, value in vars(routed).items() if isinstance(value, torch.Tensor)}
    return replace(routed, **{name: tensor.to(device) for name, tensor in tensors.items()})


@pytest.mark.parametrize("kind", sampled(KINDS, ["4 bits with zeros", "8 bits", "FP8, squares"]))
def test_experts_equal_a_loop_over_rows(kind: str, device: torch.device) -> None:
    gate_up, down = experts_of(kind)
    biases = [numbers(COUNT, rows, seed=rows) for rows in (2 * INNER, HIDDEN)]
    for rows, biased in ((1, False), (7, True), (64, False))[: 3 if kind in MANY else 2]:
        x = numbers(rows, HIDDEN, seed=rows)
        routed, given = routing(x), biases if biased else [None, None]
        on = [None if bias is None else bias.to(device) for bias in given]
        how: dict[str, Any] = {"activation": "clamped_swiglu", "limit": 0.8} if biased else {}
        got = by_kernel(
            x.to(device), gate_up.to(device), down.to(device), on, moved(routed, device), **how
        ).cpu()
        expected = by_loop(x, gate_up, down, given, routed, how.get("limit"))
        assert error(got, expected) < 3e-6
        assert routed.firsts[3] == routed.firsts[4], "an expert without rows"


def test_odd_numbers_of_outputs_and_all_rows_with_one_expert(device: torch.device) -> None:
    """Outputs end within a program's tile; one expert has all rows and the others none."""
    torch.manual_seed(5)
    gate_up = stack([[codes(19, HIDDEN, 32), codes(19, HIDDEN, 32)] for _ in range(COUNT)]).to(device)
    for rows in (5, 67):
        x = numbers(rows, HIDDEN, seed=rows)
        bias = torch.tensor([0.0, 0.0, 0.0, 0.0, 1e9])
        routed = route_experts(x, numbers(COUNT, HIDDEN), bias, count=1)
        assert routed.experts.unique().tolist() == [4]
        got = packed_expert_swiglu(x.to(device), gate_up, None, moved(routed, device)).cpu()
        both = functional.linear(x, dequantise(gate_up).cpu()[4])
        assert error(got, swiglu(both)) < 3e-6


def test_a_row_has_the_same_bits_alone_and_among_others(device: torch.device) -> None:
    gate_up, down = (one.to(device) for one in experts_of("4 bits with zeros"))
    x = numbers(70, HIDDEN, seed=10).half().to(device)

    def run(rows: torch.Tensor) -> torch.Tensor:
        return by_kernel(rows, gate_up, down, [None, None], routing(rows))

    few, many = run(x[:FEW_ROWS].clone()), run(x)
    for row in (0, 7, 15):
        assert torch.equal(run(x[row : row + 1].clone())[0], few[row])
    assert torch.equal(run(x[: FEW_ROWS + 1].clone()), many[: FEW_ROWS + 1])


def test_with_one_tile_rows_among_many_have_the_bits_of_one_alone(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate_up, down = (one.to(device) for one in experts_of("4 bits with zeros"))
    x = numbers(FEW_ROWS + 3, HIDDEN, seed=11).half().to(device)

    def run(rows: torch.Tensor, **how: Any) -> torch.Tensor:
        routed = routing(rows)
        inner = packed_expert_swiglu(rows, gate_up, None, routed, **how)
        return packed_expert_linear(inner, down, None, routed, **how).view(len(rows), CHOSEN, HIDDEN)

    asked: list[PackedMatrix] = []

    def many(matrix: PackedMatrix) -> dict[str, int]:
        asked.append(matrix)
        return many_tile(matrix)

    monkeypatch.setattr("kernels.gpu.packed_experts.many_tile", many)
    together = run(x, one_tile=True)
    assert not asked
    for row in (0, FEW_ROWS + 2):
        assert torch.equal(run(x[row : row + 1].clone())[0], together[row])
    run(x)
    assert asked, "without it other rows have another tile"


def test_another_expert_s_codes_or_scales_show(device: torch.device) -> None:
    """The bound would not hide rows of a neighbour."""
    gate_up, down = experts_of("MXFP4")
    x = numbers(7, HIDDEN)
    routed = routing(x)
    expected = by_loop(x, gate_up, down, [None, None], routed, None)
    rows = 2 * INNER
    wrong = [
        replace(gate_up.matrix, codes=gate_up.matrix.codes.roll(rows, 1).contiguous()),
        replace(gate_up.matrix, scales=gate_up.matrix.scales.roll(rows, 1).contiguous()),
    ]
    for matrix in wrong:
        shifted = PackedStack(matrix, COUNT).to(device)
        got = by_kernel(x.to(device), shifted, down.to(device), [None, None], moved(routed, device)).cpu()
        assert error(got, expected) > 1e-3


def test_rows_of_another_width_are_refused_and_no_rows_are_no_work(device: torch.device) -> None:
    gate_up = experts_of("8 bits")[0].to(device)
    none = numbers(0, HIDDEN).to(device)
    assert packed_expert_swiglu(none, gate_up, None, routing(none)).shape == (0, INNER)
    one = numbers(1, HIDDEN).to(device)
    with pytest.raises(ValueError, match="rows of 32 numbers times experts' weights of 96"):
        packed_expert_swiglu(one[:, :32].contiguous(), gate_up, None, routing(one))
