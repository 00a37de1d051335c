"""The interface of quantisation schemes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar, Protocol

import torch

from diptych.engine.weights.canonical import BadModelFile
from diptych.engine.weights.quantised.integer_codes import Codes
from diptych.engine.weights.quantised.region import Axis, Borders, Region
from kernels.packed_matrix import PackedMatrix
from kernels.quantised_linear import BlockMatrix
from kernels.scaled_matrix import ScaledMatrix

Kept = PackedMatrix | ScaledMatrix
"""Matrices as a GPU step multiplies them."""


class HeldTensors(Protocol):
    """Names of a folder's tensors."""

    def has(self, name: str) -> bool: ...


class Tensors(HeldTensors, Protocol):
    """A folder's tensors by name: whole, or what belongs to a rectangle of the matrix that they make up."""

    @property
    def region(self) -> Region | None:
        """The rectangle that is read, at borders of the matrix (`Scheme.borders`); None: all of it."""
        ...

    def size(self, name: str) -> tuple[int, ...]:
        """Return the size of a whole tensor, from the header alone. Raises BadModelFile."""
        ...

    def read(
        self, name: str, *axes: Axis | None, viewed: tuple[int, int] | None = None, as_bytes: bool = False
    ) -> torch.Tensor:
        """Read a tensor's entries that belong to the region; `axes` that are not given are read whole.

        With `viewed` a flat tensor is seen in that size, with `as_bytes` its bytes are. Raises BadModelFile.
        """
        ...


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
    def size(self, matrix: str, tensors: Tensors) -> tuple[int, int]:
        """Return rows and columns of a whole matrix, as `read` gives it. Raises BadModelFile."""

    @abstractmethod
    def borders(self, matrix: str, tensors: Tensors) -> Borders:
        """Return to what rows and columns a matrix can be cut in its file."""

    @abstractmethod
    def read(self, matrix: str, tensors: Tensors) -> Codes | torch.Tensor:
        """Read a quantised matrix, `[out, in]`: codes, or the float32 numbers that they stand for.

        Nothing else is read than the region of `tensors`.

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

    def is_quantised(self, matrix: str, tensors: HeldTensors) -> bool:
        """Return whether `matrix` (a name without ``.weight``) is quantised: schemes leave some out."""
        return any(tensors.has(f"{matrix}.{mark}") for mark in self.marks)

    def matrix_of(self, tensor: str) -> str | None:
        """Return the matrix that a tensor is a part of; None if it is not one."""
        return next((tensor[: -len(part) - 1] for part in self.parts if tensor.endswith(f".{part}")), None)


def matrix_size(name: str, tensors: Tensors, axes: tuple[int, int] = (1, 1)) -> tuple[int, int]:
    """Return the size of a tensor with two axes, each times the numbers that an entry stands for.

    Raises BadModelFile for a tensor of another number of axes.
    """
    size = tensors.size(name)
    if len(size) != 2:
        raise BadModelFile(f"tensor {name} is {size}, not a matrix")
    return size[0] * axes[0], size[1] * axes[1]
