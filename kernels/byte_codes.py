"""Byte matrices stored in four bits: the numbers of int8 in the bytes of a GGUF file's blocks.

In Q4_0 and Q4_1 a group of 32 weights has at most sixteen values, which lie evenly: `scale * code + least`.
Rounded to the steps of a segment (kernels/byte_linear.py) they are sixteen bytes, and lie evenly but for that
rounding. So a group keeps its codes as the file has them, with a slope and an intercept to read them by, in
steps of 1/256:

    byte = floor((code * slope + intercept) / 256)

The numbers are those of the bytes: a memory-bound product reads five bits for each, and unfolds them where
they are needed.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import functional

from kernels import quantised_linear
from kernels.byte_linear import ByteMatrix, peaks_of_segments, segments
from kernels.quantised_linear import GROUP, BlockMatrix, codes_of

_ONE = 256
"""Steps of a slope or an intercept in a step of a byte."""


@dataclass(frozen=True)
class CodedBytes:
    """A byte matrix in codes of four bits."""

    columns: int
    codes: torch.Tensor
    """uint8 `[rows, groups, 16]`: number i of a group is the low half of byte i, number 16 + i its high half.
    """
    slopes: torch.Tensor
    """int16 `[rows, groups, 2]`: slope and intercept, both modulo 2^16, as `code * slope + intercept` is."""
    scales: torch.Tensor
    """float32 `[rows, segments]`, as those of a ByteMatrix."""

    def __post_init__(self) -> None:
        rows, groups = self.scales.shape[0], -(-self.columns // GROUP)
        expected = (rows, groups, GROUP // 2), (rows, groups, 2), (rows, segments(self.columns)[0])
        if (tuple(self.codes.shape), tuple(self.slopes.shape), tuple(self.scales.shape)) != expected:
            raise ValueError(f"{self.columns} columns have codes, slopes and scales {expected}")
        if (self.codes.dtype, self.slopes.dtype) != (torch.uint8, torch.int16):
            raise ValueError("codes are uint8 and slopes int16")

    @property
    def shape(self) -> tuple[int, int]:
        """Size `(rows, columns)`."""
        return self.scales.shape[0], self.columns

    def contiguous(self) -> CodedBytes:
        """Return the matrix with its numbers row after row."""
        return CodedBytes(
            self.columns, self.codes.contiguous(), self.slopes.contiguous(), self.scales.contiguous()
        )


def code_matrix(matrix: BlockMatrix) -> CodedBytes | None:
    """Return the bytes nearest to the numbers of `matrix`, but for slopes that are rounded to 1/256 of a
    step.

    None for a format whose groups have more than sixteen values.
    """
    if matrix.format not in ("q4_0", "q4_1"):
        return None
    scale, least, codes = codes_of(matrix)
    groups_a_segment = segments(matrix.columns)[1] // GROUP
    scales = _peaks(matrix, scale, least, codes) / 127.0
    step = scales.repeat_interleave(groups_a_segment, dim=1)[:, : scale.shape[1]].double().unsqueeze(-1)
    # A segment of nothing but zeros has no step, and one with an infinity none that is finite.
    slopes = (torch.cat([scale, least], dim=-1).double() * _ONE / step).nan_to_num(0.0, 0.0, 0.0).round()
    slopes[..., 1] += _ONE // 2
    return CodedBytes(matrix.columns, codes, _modulo(slopes), scales)


def as_bytes(matrix: CodedBytes) -> ByteMatrix:
    """Return the matrix with a byte a number, int8 `[rows, columns]`."""
    slope, intercept = matrix.slopes.int().unsqueeze(-2).unbind(-1)
    codes = torch.cat([matrix.codes & 15, matrix.codes >> 4], dim=-1).int()
    values = (codes * slope + intercept).to(torch.int16) >> 8
    return ByteMatrix(values.to(torch.int8).flatten(1)[:, : matrix.columns].contiguous(), matrix.scales)


def _peaks(
    matrix: BlockMatrix, scale: torch.Tensor, least: torch.Tensor, codes: torch.Tensor
) -> torch.Tensor:
    """Return `peaks_of_segments` of the numbers: a group's greatest has its first or its last code."""
    if matrix.columns % GROUP:
        return peaks_of_segments(quantised_linear.dequantise(matrix))
    halves = codes & 15, codes >> 4
    first = torch.minimum(*(half.amin(dim=-1, keepdim=True) for half in halves))
    last = torch.maximum(*(half.amax(dim=-1, keepdim=True) for half in halves))
    of_groups = (scale * torch.cat([first, last], dim=-1).float() + least).abs().amax(dim=-1)
    count, width = segments(matrix.columns)
    padded = functional.pad(of_groups, (0, count * width // GROUP - of_groups.shape[1]))
    return padded.view(len(padded), count, -1).amax(dim=-1)


def _modulo(whole: torch.Tensor) -> torch.Tensor:
    """Convert float64 whole numbers to int16, modulo 2^16."""
    return torch.remainder(whole + 2**15, 2**16).sub(2**15).to(torch.int16)
