"""The library's FP8 product, where this torch and this card have one.

| scales | torch's name | cards | sizes |
|---|---|---|---|
| a number for all of each matrix | TensorWise | 8.9 and later | K and N multiples of 16 |
| one for each row of inputs and each output | RowWise | 8.9 and later | the same; results bfloat16 |
| 1 x 128 of inputs, squares of 128 of the matrix | BlockWise | 9.0, CUDA 12.9 and later | multiples of 128 |

Inputs are row-major, the matrix column-major: `[N, K]` as it is stored, transposed. Only RowWise is taken
here: a scale of a whole matrix is the same number for each output, and rows share no scale, so that no row
changes another's bits. Products over squares are our own kernel's. Cards differ by driver and library as
well, so `find_product` tries the product once and holds it against the meaning; what fails is not used.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable

import torch
from torch.nn import functional

from kernels.scaled_matrix import FP8, quantise, round_rows

_LOG = logging.getLogger(__name__)
_ALIGNED = 16
FIRST_CARD = (8, 9)
"""Compute capability of the first cards with FP8."""

ScaledProduct = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""`(x [T, K], x_scales [T, 1], values [N, K], scales [N, 1])`: bfloat16 `[T, N]`, rows and matrix in FP8."""


def fits(outputs: int, inputs: int) -> bool:
    """Return whether the library takes a matrix of this size."""
    return outputs % _ALIGNED == 0 and inputs % _ALIGNED == 0


def has_fp8(device: torch.device) -> bool:
    """Return whether a device rounds to FP8; the CPU (Triton's interpreter) does."""
    return device.type != "cuda" or torch.cuda.get_device_capability(device) >= FIRST_CARD


@functools.lru_cache(maxsize=16)
def find_product(device: torch.device) -> ScaledProduct | None:
    """Return the library's product with a scale for each row and output, None where it has none or a wrong
    one.
    """
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(32, 64, generator=generator)
    matrix = quantise(torch.randn(48, 64, generator=generator), FP8)
    values, scales = round_rows(x, FP8)
    expected = functional.linear(values.float(), matrix.values.float()) * scales * matrix.scales.T
    parts = [one.to(device) for one in (values, scales, matrix.values, matrix.scales)]
    for product in (_scaled_mm, _functional):
        try:
            found = product(*parts).float().cpu()
        except (RuntimeError, TypeError, ValueError, NotImplementedError, AttributeError) as error:
            _LOG.debug("no library product of FP8 by %s: %s", product.__name__, error)
            continue
        if float((found - expected).norm() / expected.norm()) < 0.01:
            return product
        _LOG.warning("the library's product of FP8 on %s is wrong, and not used", device)
    return None


def _scaled_mm(
    x: torch.Tensor, x_scales: torch.Tensor, values: torch.Tensor, scales: torch.Tensor
) -> torch.Tensor:
    """Multiply by the function of torch up to 2.13 at least."""
    return torch._scaled_mm(x, values.t(), x_scales, scales.t(), out_dtype=torch.bfloat16)


def _functional(
    x: torch.Tensor, x_scales: torch.Tensor, values: torch.Tensor, scales: torch.Tensor
) -> torch.Tensor:
    """Multiply by the public function that takes its place."""
    rows = functional.ScalingType.RowWise
    return functional.scaled_mm(x, values.t(), x_scales, rows, scales.t(), rows, output_dtype=torch.bfloat16)
