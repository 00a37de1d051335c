"""The interface of quantisation schemes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar, Protocol

import torch

from diptych.engine.weights.quantised.integer_codes import Codes
from kernels.packed_matrix import PackedMatrix
from kernels.quantised_linear import BlockMatrix
from kernels.scaled_matrix import ScaledMatrix

Kept = PackedMatrix | ScaledMatrix
"""Matrices as a GPU step multiplies them."""


class Tensors(Protocol):
    """A folder's tensors by name."""

    def has(self, name: str) -> bool: ...
    def read(self, name: str) -> torch.Tensor: ...


class Scheme(ABC):
    """Reader of a folder's quantised matrices; those that are not quantised lie there as ``weight``."""

    parts: ClassVar[frozenset[str]]
    """Suffixes of the tensors of a quantised matrix, but for ``weight``."""

    keeps_codes = False
    """True if its codes can be kept as they are, in blocks of 32 (`Codes.in_blocks`, or `read_blocks`)."""

    has_tables = False
    """True if its codes are places in a table, which int8 does not keep."""

    packs = False
    """True if a GPU step can keep its codes (`read_packed`), where their groups allow it."""

    marks: ClassVar[tuple[str, ...]]
    """Parts that mark a quantised matrix: it has one of them."""

    @abstractmethod
    def read(self, matrix: str, tensors: Tensors) -> Codes | torch.Tensor:
        """Read a quantised matrix, `[out, in]`: codes, or the float32 numbers that they stand for.

        Raises BadModelFile where its parts do not fit together, and UnsupportedModel for what is not read.
        """

    def read_packed(self, matrix: str, tensors: Tensors) -> Codes | Kept | torch.Tensor:
        """Read a quantised matrix for a GPU step: in codes that it keeps, or as `read` does."""
        return self.read(matrix, tensors)

    def read_blocks(self, matrix: str, tensors: Tensors) -> BlockMatrix | None:
        """Read a quantised matrix, `[out, in]`, whose blocks a CPU multiplies; None: it has codes.

        Raises BadModelFile where its parts do not fit together.
        """
        return None

    def is_quantised(self, matrix: str, tensors: Tensors) -> bool:
        """Return whether `matrix` (a name without ``.weight``) is quantised: schemes leave some out."""
        return any(tensors.has(f"{matrix}.{mark}") for mark in self.marks)

    def matrix_of(self, tensor: str) -> str | None:
        """Return the matrix that a tensor is a part of; None if it is not one."""
        return next((tensor[: -len(part) - 1] for part in self.parts if tensor.endswith(f".{part}")), None)
