"""Products of a few rows on the GPU: any shape, and the same bits whatever the number of rows."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from kernels.gpu.skinny_linear import MOST_ROWS, skinny_linear, skinny_swiglu
from kernels.gpu.swiglu import swiglu
from kernels.swiglu import swiglu as gated_meaning
from tests.forms import sampled
from tests.kernels.gpu.paged import TOLERANCE, error

SHORT = [torch.float16, torch.bfloat16]
SHAPES = [
    # Rows; N and K of the weight: tiles of 16 x 256, and from N = 16,384 on of 64 x 128.
    (1, 16, 256),
    (3, 24, 8),
    (16, 40, 264),
    (5, 67, 1000),
    (2, 16_384, 128),
    (9, 16_424, 136),
]
BITS = {torch.float16: torch.int16, torch.bfloat16: torch.int16, torch.float32: torch.int32}


def case(
    rows: int, outputs: int, inputs: int, dtype: torch.dtype, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x `[rows, inputs]`, weight `[outputs, inputs]`, bias `[outputs]`; the memory behind each is NaN."""
    torch.manual_seed(rows)
    made = []
    for sizes, scale in (((rows, inputs), 1.0), ((outputs, inputs), 2 * inputs**-0.5), ((outputs,), 0.5)):
        memory = torch.full((sizes[0] + 64, *sizes[1:]), torch.nan, dtype=dtype, device=device)
        memory[: sizes[0]] = (torch.randn(sizes, device=device) * scale).to(dtype)
        made.append(memory[: sizes[0]])
    return made[0], made[1], made[2]


def meaning(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Return the result in float64, before it is rounded."""
    return functional.linear(x.double(), weight.double(), None if bias is None else bias.double())


def bits(numbers: torch.Tensor) -> torch.Tensor:
    return numbers.view(BITS[numbers.dtype])


@pytest.mark.parametrize("biased", sampled([False, True], [True]))
@pytest.mark.parametrize("dtype", SHORT)
@pytest.mark.parametrize(("rows", "outputs", "inputs"), sampled(SHAPES, SHAPES[:-1]))
def test_skinny_linear_equals_the_product(
    rows: int, outputs: int, inputs: int, dtype: torch.dtype, biased: bool, device: torch.device
) -> None:
    x, weight, some = case(rows, outputs, inputs, dtype, device)
    bias = some if biased else None
    memory = torch.full((rows + 2, outputs), 7.0, dtype=dtype, device=device)
    out = memory[1:-1]
    got = skinny_linear(x, weight, bias, out=out)
    assert got is out
    assert error(got, meaning(x, weight, bias)) < TOLERANCE[dtype]
    assert bool((memory[[0, -1]] == 7.0).all()), "no row beside its own is written"


@pytest.mark.parametrize("dtype", SHORT)
@pytest.mark.parametrize(("rows", "outputs", "inputs"), [(2, 67, 264), (1, 16_392, 128)])
def test_skinny_linear_keeps_float32_results_unrounded(
    rows: int, outputs: int, inputs: int, dtype: torch.dtype, device: torch.device
) -> None:
    x, weight, _ = case(rows, outputs, inputs, dtype, device)
    out = torch.full((rows, outputs), torch.nan, device=device)
    skinny_linear(x, weight, out=out)
    # Matrix instructions cut off where they add; one rounding to float16 would be 2e-4.
    assert error(out, meaning(x, weight, None)) < 1e-5


@pytest.mark.parametrize("biased", sampled([False, True], [True]))
@pytest.mark.parametrize("dtype", SHORT)
@pytest.mark.parametrize(
    ("rows", "outputs", "inputs"),
    [(1, 16, 256), (16, 74, 520), pytest.param(3, 16_400, 136, marks=pytest.mark.full)],
)
def test_the_gated_product_has_the_bits_of_product_and_activation(
    rows: int, outputs: int, inputs: int, dtype: torch.dtype, biased: bool, device: torch.device
) -> None:
    x, weight, some = case(rows, outputs, inputs, dtype, device)
    bias = some if biased else None
    gate_up = skinny_linear(x, weight, bias)
    out = torch.full((rows, outputs // 2), torch.nan, dtype=dtype, device=device)
    got = skinny_swiglu(x, weight, bias, out=out)
    assert got is out
    assert torch.equal(bits(got), bits(swiglu(gate_up)))
    assert error(got, gated_meaning(meaning(x, weight, bias))) < 2 * TOLERANCE[dtype]


@pytest.mark.parametrize(
    ("outputs", "inputs", "dtype"),
    [
        *((40, 1000, dtype) for dtype in SHORT),
        *(pytest.param(16_392, 64, dtype, marks=pytest.mark.full) for dtype in SHORT),
    ],
)
def test_a_row_alone_has_the_bits_that_it_has_among_others(
    outputs: int, inputs: int, dtype: torch.dtype, device: torch.device
) -> None:
    x, weight, bias = case(MOST_ROWS, outputs, inputs, dtype, device)
    among = [skinny_linear(x, weight, bias), skinny_swiglu(x, weight, bias)]
    for first, last in ((0, 1), (15, 16), (3, 12)):
        alone = [skinny_linear(x[first:last], weight, bias), skinny_swiglu(x[first:last], weight, bias)]
        for one, all_rows in zip(alone, among, strict=True):
            assert torch.equal(bits(one), bits(all_rows[first:last]))


def test_a_row_that_is_not_finite_spoils_no_other(device: torch.device) -> None:
    x, weight, _ = case(4, 24, 264, torch.float16, device)
    expected = skinny_linear(x, weight)
    x[2] = torch.nan
    got = skinny_linear(x, weight)
    assert bool(got[2].isnan().all())
    assert torch.equal(got[[0, 1, 3]], expected[[0, 1, 3]])


def test_no_rows_are_no_work_and_too_many_or_others_are_refused(device: torch.device) -> None:
    x, weight, bias = case(MOST_ROWS + 1, 16, 16, torch.bfloat16, device)
    assert skinny_linear(x[:0], weight, bias).shape == (0, 16)
    assert skinny_swiglu(x[:0], weight, bias).shape == (0, 8)
    with pytest.raises(ValueError, match="17 rows"):
        skinny_linear(x, weight)
    with pytest.raises(TypeError, match="16 bits"):
        skinny_linear(x[:1].float(), weight.float())
    with pytest.raises(TypeError, match="16 bits"):
        skinny_linear(x[:1], weight.half())
    with pytest.raises(ValueError, match="weights of 16"):
        skinny_linear(x[:1, :8].contiguous(), weight)
    with pytest.raises(ValueError, match="not contiguous"):
        skinny_linear(x[:2].t(), weight[:, :2])


@pytest.mark.gpu
def test_weights_of_more_than_two_billion_numbers(device: torch.device) -> None:
    if device.type == "cpu":
        pytest.skip("4 GiB of weights are for a GPU")
    outputs, inputs = (1 << 18) + 24, 1 << 13
    weight = torch.zeros(outputs, inputs, dtype=torch.bfloat16, device=device)
    x, some, _ = case(2, 48, inputs, torch.bfloat16, device)
    weight[-48:] = some
    got = skinny_linear(x, weight)
    assert not bool(got[:, :-48].any())
    assert error(got[:, -48:], meaning(x, some, None)) < TOLERANCE[torch.bfloat16]
    gated = skinny_swiglu(x, weight)
    assert not bool(gated.any()), "the gates are zero"
