"""Linear layers over weights of 8 bits, with activations of 8 bits in long segments and a few of 16.

Both operands are cut along the depth into segments of at most 576 numbers with one scale each, so that a
product needs one multiplication of floats for 576 of whole numbers. One scale for so many would leave nothing
of most activations, for a few of a transformer are a hundred times the others (Dettmers et al. 2022). These
keep to a few columns: the four outlier columns of a segment have 16 bits, a column being a line of four
neighbouring numbers, and the scale goes by the greatest of the others. There are always four, so that kernels
need no branch.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import functional

SEGMENT = 576
"""The most numbers along the depth that share a scale: a row of the bundled model. What each segment costs
beside its products, its scale and its outlier columns, is halved by this against 288: a twentieth of a
prompt's time. lab/results has the price in quality.
"""

GROUP = 32
"""Segments are whole multiples of it; the last group of a row is padded with zeros."""

LINE = 4
"""Neighbouring numbers that have 8 or 16 bits together: what a dot product of bytes takes at once."""

OUTLIER_COLUMNS = 4
"""Lines of a segment of activations that have 16 bits a number, those with the greatest peaks."""

_LEAST_PEAK = 1e-35
"""Below this the reciprocal of a scale overflows; such a segment is zero for every purpose."""

_LINE_BITS = 255
"""Kernels keep the place of a line in the last bits of its peak while they look for outlier columns."""


@dataclass(frozen=True)
class ByteMatrix:
    """A matrix of whole numbers with a scale for each segment of a row."""

    values: torch.Tensor
    """int8 `[rows, columns]`, -127 .. 127."""
    scales: torch.Tensor
    """float32 `[rows, segments]`."""

    def __post_init__(self) -> None:
        values, scales = self.values, self.scales
        if values.dtype != torch.int8 or values.ndim != 2 or scales.dtype != torch.float32:
            raise ValueError("a byte matrix is int8 [rows, columns] and float32 [rows, segments]")
        expected = (values.shape[0], segments(values.shape[1])[0])
        if tuple(scales.shape) != expected:
            raise ValueError(f"{values.shape[1]} columns have scales {expected}, not {tuple(scales.shape)}")

    @property
    def shape(self) -> tuple[int, int]:
        """Size `(rows, columns)`."""
        return self.values.shape[0], self.values.shape[1]

    def contiguous(self) -> ByteMatrix:
        """Return the matrix with its numbers row after row."""
        return ByteMatrix(self.values.contiguous(), self.scales.contiguous())


def segments(columns: int) -> tuple[int, int]:
    """Return how many segments a row of `columns` numbers has, and how wide they are; the last may be
    shorter.
    """
    groups = -(-columns // GROUP)
    count = -(-groups * GROUP // SEGMENT)
    return count, -(-groups // count) * GROUP


def peaks_of_segments(matrix: torch.Tensor) -> torch.Tensor:
    """Return the greatest magnitude of each segment of `matrix [rows, columns]`: `[rows, segments]`."""
    return _in_segments(matrix).abs().amax(dim=-1)


def quantise_matrix(matrix: torch.Tensor) -> ByteMatrix:
    """Round `matrix [rows, columns]` to whole numbers, in steps of 1/127 of each segment's peak."""
    scales = peaks_of_segments(matrix) / 127.0
    steps = torch.where(scales > 0, scales, 1.0).unsqueeze(-1)
    values = (_in_segments(matrix) / steps).round_().clamp_(-127, 127).to(torch.int8)
    return ByteMatrix(values.flatten(1)[:, : matrix.shape[1]].contiguous(), scales)


def dequantise(matrix: ByteMatrix) -> torch.Tensor:
    """Return the float32 numbers `[rows, columns]` that the bytes stand for, exactly."""
    columns = matrix.shape[1]
    numbers = _in_segments(matrix.values) * matrix.scales.unsqueeze(-1)
    return numbers.flatten(1)[:, :columns].contiguous()


def quantise_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise `x [rows, columns]` to whole numbers, int32 `[rows, segments, width]`, and their scales.

    Scales are float32 `[rows, segments, 1]`. Numbers of outlier columns reach from -32512 to 32512, the
    others from -127 to 127. Which of columns with the same peak is an outlier makes no difference. A segment
    with an infinity or a NaN has the scale NaN.
    """
    cut = _in_segments(x)
    peaks = cut.unflatten(-1, (-1, LINE)).abs().amax(dim=-1)
    finite = peaks.isfinite().all(dim=-1, keepdim=True)
    known = (peaks.view(torch.int32) & ~_LINE_BITS).view(torch.float32)
    greatest = torch.where(finite, known, 0.0).topk(OUTLIER_COLUMNS + 1, dim=-1).values
    top = torch.maximum(greatest[..., -1:], greatest[..., :1] / 256.0)
    inverse = torch.where(top > _LEAST_PEAK, 127.0 / top, 0.0)
    values = torch.where(finite, cut * inverse, 0.0).round().to(torch.int32)
    return values, torch.where(finite, top / 127.0, torch.nan)


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Multiply `x [rows, columns]`, quantised in segments, with the transpose of `weight [out, columns]`:
    float32.

    The reference: `weight` is dequantised, `bias` is `[out]`. Kernels keep the bytes and sum the whole
    numbers of each segment exactly, which differs from this in the rounding of float32 sums only.
    """
    values, scales = quantise_rows(x)
    rounded = (values.float() * scales).flatten(1)[:, : x.shape[1]]
    return functional.linear(rounded, weight, bias)


def _in_segments(x: torch.Tensor) -> torch.Tensor:
    """Return float32 `[rows, segments, width]` of `x [rows, columns]`, with zeros at the end."""
    count, width = segments(x.shape[1])
    return functional.pad(x.float(), (0, count * width - x.shape[1])).view(x.shape[0], count, width)
