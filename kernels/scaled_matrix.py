"""Matrices of FP8 (E4M3) or int8 whose products take inputs rounded to the same format: W8A8.

Scales are float32 and belong to an output of the matrix and to a row of inputs, or (FP8 alone, DeepSeek-V3's
technical report) to squares of 128 by 128 of the matrix and to 128 neighbouring numbers of a row. A row's
scale is its largest number's unless the checkpoint fixes one for all rows (`static`). Sums are float32 of
exact products, int32 in int8; scales are applied to the sums.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch.nn import functional

from kernels.packed_matrix import PackedMatrix, pack

SQUARE = 128
FP8, INT8 = torch.float8_e4m3fn, torch.int8
PEAK = {FP8: 448.0, INT8: 127.0}
"""Largest number of each format that rows are scaled to."""
_LEAST_PEAK = 1e-12
"""A row below this is zero for every purpose, and its scale must not be."""


@dataclass(frozen=True)
class ScaledMatrix:
    """A matrix `[rows, columns]`."""

    values: torch.Tensor
    """FP8 or int8 `[rows, columns]`."""
    scales: torch.Tensor
    """float32 `[rows, 1]`; of squares `[ceil(rows / 128), ceil(columns / 128)]`."""
    squares: bool = False
    static: torch.Tensor | None = None
    """float32 `[1]`: the scale of all rows of inputs; None: each has its own."""

    def __post_init__(self) -> None:
        rows, columns = self.values.shape
        expected = (-(-rows // SQUARE), -(-columns // SQUARE)) if self.squares else (rows, 1)
        if self.squares and self.values.dtype != FP8:
            raise ValueError(f"squares of scales are of FP8, not of {self.values.dtype}")
        if self.values.dtype not in PEAK or tuple(self.scales.shape) != expected:
            raise ValueError(f"{self.values.dtype} with scales {tuple(self.scales.shape)}, not {expected}")

    @property
    def shape(self) -> tuple[int, int]:
        """Size `(rows, columns)`."""
        return self.values.shape[0], self.values.shape[1]

    @property
    def nbytes(self) -> int:
        return self.values.nbytes + self.scales.nbytes

    def contiguous(self) -> ScaledMatrix:
        """Return the matrix with its numbers in one piece."""
        return replace(self, values=self.values.contiguous(), scales=self.scales.contiguous())

    def to(self, device: torch.device) -> ScaledMatrix:
        """Return the matrix on `device`."""
        static = None if self.static is None else self.static.to(device)
        return replace(self, values=self.values.to(device), scales=self.scales.to(device), static=static)

    def rows(self, rows: slice | torch.Tensor) -> ScaledMatrix | PackedMatrix:
        """Return the chosen rows; of squares that they cut, packed codes for inputs that are not rounded."""
        if not self.squares:
            return replace(self, values=self.values[rows], scales=self.scales[rows]).contiguous()
        chosen = torch.arange(len(self.values))[rows]
        first, end = int(chosen[0]), int(chosen[-1]) + 1
        ends = end % SQUARE == 0 or end == len(self.values)
        if first % SQUARE or not ends or not torch.equal(chosen, torch.arange(first, end)):
            return weights_only(self).rows(rows)
        scales = self.scales[first // SQUARE : -(-end // SQUARE)]
        return replace(self, values=self.values[rows], scales=scales).contiguous()


def quantise(matrix: torch.Tensor, dtype: torch.dtype) -> ScaledMatrix:
    """Round `matrix [rows, columns]` to FP8 or int8, with the scale of each row's largest number."""
    values, scales = round_rows(matrix.float(), dtype)
    return ScaledMatrix(values, scales)


def weights_only(matrix: ScaledMatrix) -> PackedMatrix:
    """Return the same numbers in packed codes, whose products take inputs as they are."""
    rows, columns = matrix.shape
    scales, group = matrix.scales, SQUARE if matrix.squares else columns
    if matrix.squares:
        scales = scales.repeat_interleave(SQUARE, 0)[:rows]
    if matrix.values.dtype == INT8:
        found = pack("int8", (matrix.values.int() + 128).to(torch.uint8), scales, group, zero=128)
    else:
        found = pack("fp8", matrix.values.view(torch.uint8), scales, group)
    assert found is not None, "128 columns are whole runs, and so is one group"
    return found


def dequantise(matrix: ScaledMatrix) -> torch.Tensor:
    """Return the float32 numbers `[rows, columns]`."""
    return matrix.values.float() * _of_each(matrix.scales, matrix.squares, matrix.shape)


def _of_each(scales: torch.Tensor, squares: bool, shape: tuple[int, int]) -> torch.Tensor:
    if not squares:
        return scales
    wide = scales.repeat_interleave(SQUARE, 0)[: shape[0]]
    return wide.repeat_interleave(SQUARE, 1)[:, : shape[1]]


def round_rows(
    x: torch.Tensor, dtype: torch.dtype, *, squares: bool = False, static: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Round `x [T, columns]` to `dtype`; returns it and float32 scales `[T, groups]`, a group 128 numbers
    with `squares`, else the row.
    """
    width = SQUARE if squares else x.shape[1]
    groups = functional.pad(x.float(), (0, -x.shape[1] % width)).unflatten(1, (-1, width))
    peak = PEAK[dtype]
    scales = groups.abs().amax(-1).clamp(min=_LEAST_PEAK) / peak
    if static is not None:
        scales = static.float().expand_as(scales)
    scaled = (groups / scales.unsqueeze(-1)).clamp(-peak, peak)
    rounded = scaled.round() if dtype == INT8 else scaled
    return rounded.to(dtype).flatten(1)[:, : x.shape[1]].contiguous(), scales.contiguous()


def scaled_linear(x: torch.Tensor, weight: ScaledMatrix, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Multiply `x [T, columns]`, rounded, with the transpose of `weight`, and add `bias [rows]`.

    The reference: float32 `[T, rows]`.
    """
    values, scales = round_rows(x, weight.values.dtype, squares=weight.squares, static=weight.static)
    return product_of_rounded(values, scales, weight, bias)


def unrounded_linear(x: torch.Tensor, weight: ScaledMatrix, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Return float32 `[T, rows]`: `x [T, columns]`, as it is, times the transpose of `weight`, and `bias`."""
    out = functional.linear(x.float(), dequantise(weight))
    return out if bias is None else out + bias.float()


def product_of_rounded(
    values: torch.Tensor, scales: torch.Tensor, weight: ScaledMatrix, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """Return `scaled_linear` of rows that `round_rows` made `values [T, columns]` and `scales` of."""
    if weight.squares:
        wide = scales.repeat_interleave(SQUARE, 1)[:, : weight.shape[1]]
        out = functional.linear(values.float() * wide, dequantise(weight))
    else:
        # float64 holds int32 sums, and those of FP8 to their last bit.
        sums = functional.linear(values.double(), weight.values.double())
        out = sums.float() * scales * weight.scales.T
    return out if bias is None else out + bias.float()


def join(parts: Sequence[ScaledMatrix]) -> ScaledMatrix | None:
    """Return matrices of one input as one, rows after rows; None for matrices that are not alike.

    Of several static scales of one input the largest holds: it clips none of the others' inputs.
    """
    first = parts[0]
    kinds = {(part.values.dtype, part.squares, part.static is None) for part in parts}
    if len(kinds) > 1 or (first.squares and any(part.shape[0] % SQUARE for part in parts[:-1])):
        return None
    statics = [part.static for part in parts if part.static is not None]
    return ScaledMatrix(
        torch.cat([part.values.view(torch.uint8) for part in parts]).view(first.values.dtype),
        torch.cat([part.scales for part in parts]),
        first.squares,
        torch.stack(statics).amax(0) if statics else None,
    )
