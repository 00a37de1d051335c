"""The library's FP8 product, where this torch and this card have one.

| scales | torch's name | cards | sizes |
|---|---|---|---|
| a number for all of each matrix | TensorWise | 8.9 and later | K and N multiples of 16 |
| one for each row of inputs and each output | RowWise | 8.9 and later | the same; results bfloat16 |
| 1 x 128 of inputs, squares of 128 of the matrix | BlockWise | 9.0, CUDA 12.9 and later | multiples of 128 |

Inputs are row-major, the matrix column-major: `[N, K]` as it is stored, transposed. TensorWise is not taken:
a scale of a whole matrix is the same number for each output, and rows share no scale, so that no row changes
another's bits. BlockWise takes scales of inputs group after group, T padded to four, and those of the matrix
in rows padded to four. Results are written where they belong: on an H200 a copy of them costs a sixth of the
product of many rows. Cards differ by driver and library as well, so both are tried once and held against the
meaning; what fails is not used.
"""

from __future__ import annotations

import functools
import logging
from typing import Protocol

import torch
from torch.nn import functional

from kernels.scaled_matrix import FP8, SQUARE, ScaledMatrix, product_of_rounded, quantise, round_rows

_LOG = logging.getLogger(__name__)
_ALIGNED = 16
FIRST_CARD = (8, 9)
"""Compute capability of the first cards with FP8."""


class ScaledProduct(Protocol):
    """The library's product of rows and a matrix in FP8, without a bias."""

    def __call__(
        self,
        x: torch.Tensor,
        x_scales: torch.Tensor,
        values: torch.Tensor,
        scales: torch.Tensor,
        *,
        out: torch.Tensor,
    ) -> torch.Tensor:
        """Multiply `x [T, K]` and `x_scales` as `round_rows` gives them with a matrix' `values [N, K]` and
        `scales` of `library_scales`, into `out`, bfloat16 `[T, N]` in one piece.
        """
        ...


def fits(weight: ScaledMatrix) -> bool:
    """Return whether the library takes a matrix of this size."""
    aligned = SQUARE if weight.squares else _ALIGNED
    return all(size % aligned == 0 for size in weight.shape)


def has_fp8(device: torch.device) -> bool:
    """Return whether a device rounds to FP8; the CPU (Triton's interpreter) does."""
    return device.type != "cuda" or torch.cuda.get_device_capability(device) >= FIRST_CARD


@functools.lru_cache(maxsize=16)
def find_product(device: torch.device, squares: bool) -> ScaledProduct | None:
    """Return the library's product with a scale for each row and output, or over `squares` of scales.

    None where it has none or a wrong one.
    """
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(30, 5 * SQUARE, generator=generator)
    matrix = _drawn(generator, squares)
    values, scales = round_rows(x, FP8, squares=squares)
    expected = product_of_rounded(values, scales, matrix)
    x_scales = _moved(_by_group(scales) if squares else scales, device)
    of_matrix = _moved(library_scales(matrix), device)
    out = torch.empty(expected.shape, dtype=torch.bfloat16, device=device)
    for product in (_blocks_out, _blocks) if squares else (_rows_out, _rows):
        try:
            product(values.to(device), x_scales, matrix.values.to(device), of_matrix, out=out)
        except (RuntimeError, TypeError, ValueError, NotImplementedError, AttributeError) as error:
            _LOG.debug("no library product of FP8 by %s: %s", product.__name__, error)
            continue
        if float((out.float().cpu() - expected).norm() / expected.norm()) < 0.01:
            return product
        _LOG.warning("the library's product of FP8 on %s is wrong, and not used", device)
    return None


def _drawn(generator: torch.Generator, squares: bool) -> ScaledMatrix:
    numbers = torch.randn(2 * SQUARE, 5 * SQUARE, generator=generator)
    if not squares:
        return quantise(numbers, FP8)
    return ScaledMatrix(numbers.to(FP8), torch.rand(2, 5, generator=generator) + 0.1, squares=True)


def _by_group(scales: torch.Tensor) -> torch.Tensor:
    """Return `[T, groups]` in the layout of kernels/gpu/round_rows.py."""
    return functional.pad(scales.t(), (0, -len(scales) % 4)).contiguous().t()[: len(scales)]


def _moved(scales: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return scales on `device` with the strides that they have."""
    laid = torch.empty_strided(scales.shape, scales.stride(), dtype=scales.dtype, device=device)
    return laid.copy_(scales)


def library_scales(weight: ScaledMatrix) -> torch.Tensor:
    """Return the scales of a matrix as the library takes them: `[1, N]`, or `[groups, N / 128]` of squares
    with groups padded to a multiple of four.
    """
    if not weight.squares:
        return weight.scales.t()
    return functional.pad(weight.scales, (0, -weight.scales.shape[1] % 4)).contiguous().t()


def _rows_out(
    x: torch.Tensor,
    x_scales: torch.Tensor,
    values: torch.Tensor,
    scales: torch.Tensor,
    *,
    out: torch.Tensor,
) -> torch.Tensor:
    """Multiply by the function of torch up to 2.13 at least."""
    return torch._scaled_mm(x, values.t(), x_scales, scales, out_dtype=torch.bfloat16, out=out)


def _rows(
    x: torch.Tensor,
    x_scales: torch.Tensor,
    values: torch.Tensor,
    scales: torch.Tensor,
    *,
    out: torch.Tensor,
) -> torch.Tensor:
    """Multiply by the public function that takes its place, which allocates its result."""
    rows = functional.ScalingType.RowWise
    found = functional.scaled_mm(x, values.t(), x_scales, rows, scales, rows, output_dtype=torch.bfloat16)
    return out.copy_(found)


def _blocks_out(
    x: torch.Tensor,
    x_scales: torch.Tensor,
    values: torch.Tensor,
    scales: torch.Tensor,
    *,
    out: torch.Tensor,
) -> torch.Tensor:
    """Multiply over squares by what lies below the public function, into `out`."""
    kinds = functional.ScalingType
    return torch._scaled_mm_v2(
        x, values.t(), [x_scales], [int(kinds.BlockWise1x128.value)], [],
        [scales], [int(kinds.BlockWise128x128.value)], [], None, torch.bfloat16, out=out,
    )  # fmt: skip


def _blocks(
    x: torch.Tensor,
    x_scales: torch.Tensor,
    values: torch.Tensor,
    scales: torch.Tensor,
    *,
    out: torch.Tensor,
) -> torch.Tensor:
    """Multiply over squares by the public function, which allocates its result."""
    kinds = functional.ScalingType
    found = functional.scaled_mm(
        x, values.t(), x_scales, kinds.BlockWise1x128, scales,
        kinds.BlockWise128x128, output_dtype=torch.bfloat16,
    )  # fmt: skip
    return out.copy_(found)
