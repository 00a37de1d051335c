"""Matrices of all experts of a layer in packed codes (kernels/packed_matrix.py), as one matrix.

Rows are those of one expert after another, so that what a program reads of an expert's tile still lies in one
piece. FP8 stays FP8 and int8 int8; inputs of their products are not rounded, whatever the file says: a step
of few rows is the reading of the codes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kernels import packed_matrix
from kernels.packed_matrix import PackedMatrix
from kernels.scaled_matrix import ScaledMatrix, weights_only


@dataclass(frozen=True)
class PackedStack:
    """Matrices `[experts, rows, columns]` of one layer's experts."""

    matrix: PackedMatrix
    """Rows of all experts, those of one after those of the one before."""
    experts: int

    def __post_init__(self) -> None:
        if self.experts < 1 or self.matrix.shape[0] % self.experts:
            raise ValueError(f"{self.matrix.shape[0]} rows are not those of {self.experts} experts")

    @property
    def shape(self) -> tuple[int, int, int]:
        """Size `(experts, rows, columns)`."""
        rows, columns = self.matrix.shape
        return self.experts, rows // self.experts, columns

    @property
    def nbytes(self) -> int:
        """Bytes of all its tensors."""
        return self.matrix.nbytes

    def to(self, device: torch.device) -> PackedStack:
        """Return the stack on `device`."""
        return PackedStack(self.matrix.to(device), self.experts)


def lacks(experts: Sequence[Sequence[object]]) -> str | None:
    """Return in words why the matrices of each expert are no stack; None if they are. Copies nothing."""
    parts = [matrix for own in experts for matrix in own]
    packed = [part for part in parts if isinstance(part, PackedMatrix)]
    scaled = [part for part in parts if isinstance(part, ScaledMatrix)]
    if len(packed) + len(scaled) < len(parts):
        return "full numbers"
    if packed and not scaled and packed_matrix.are_alike(packed):
        return None
    if not packed and len({(part.values.dtype, part.squares, part.shape[1]) for part in scaled}) == 1:
        return None
    if any(part.order is not None for part in packed):
        return "inputs in an order of each matrix' own"
    return "matrices of several kinds"


def stack(experts: Sequence[Sequence[object]]) -> PackedStack:
    """Return the matrices of each expert, rows after rows, as a stack. Raises ValueError if it `lacks`."""
    if (reason := lacks(experts)) is not None:
        raise ValueError(f"no stack of {reason}")
    joined = packed_matrix.join([as_codes(matrix) for own in experts for matrix in own])
    assert joined is not None, "matrices that are alike"
    return PackedStack(joined, len(experts))


def as_codes(matrix: object) -> PackedMatrix:
    """Return a matrix in packed codes, FP8 and int8 with the same numbers. Raises TypeError for others."""
    if isinstance(matrix, ScaledMatrix):
        return weights_only(matrix)
    if not isinstance(matrix, PackedMatrix):
        raise TypeError(f"{type(matrix).__name__} has no codes")
    return matrix


def dequantise(found: PackedStack) -> torch.Tensor:
    """Return the float32 numbers `[experts, rows, columns]`."""
    return packed_matrix.dequantise(found.matrix).view(found.shape)
