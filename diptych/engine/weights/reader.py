"""A checkpoint whose shape is known and whose tensors are read when they are asked for, whole or cut."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from diptych.engine.models.family import Stored
from diptych.engine.models.shape import BadModelFile, ModelShape, UnsupportedModel
from diptych.engine.weights.canonical import Checkpoint, Matrix, assemble, field_of
from diptych.engine.weights.rows import Rows


@dataclass(frozen=True)
class Cut:
    """Part of a canonical tensor that is read; None stands for all."""

    rows: range | None = None
    columns: range | None = None


WHOLE = Cut()


class TensorReader(Protocol):
    """Reads a tensor by its canonical name, as the precision stores it: of the file no more than `cut` says.

    Raises UnsupportedModel for a cut of a tensor that is made of more than its own rows.
    """

    def __call__(self, name: str, cut: Cut = WHOLE) -> Matrix: ...


@dataclass(frozen=True)
class OpenCheckpoint:
    """A model's files, opened."""

    shape: ModelShape
    read: TensorReader
    own_head: bool
    """True if the output matrix is read as `head`, a tensor of its own."""
    kv_scales: torch.Tensor | None = None
    files: tuple[Path, ...] = ()
    """Files that are mapped to be read."""

    def read_all(self) -> Checkpoint:
        """Read every tensor. Raises UnsupportedModel if one has another shape than the model's says."""
        return Checkpoint(self.shape, assemble(self.shape, self.read, own_head=self.own_head), self.kv_scales)


def rows_to_read(rows: Rows, cut: Cut) -> tuple[slice, torch.Tensor | None]:
    """Return the rows of a file's tensor that hold the rows `cut` of the canonical one, and their order.

    `rows` are those of the whole canonical tensor (rows.py). The order is None where it is the file's; else
    it indexes the rows that were read.
    """
    wanted = cut.rows
    if rows is None:
        return (slice(None) if wanted is None else slice(wanted.start, wanted.stop)), None
    if isinstance(rows, slice):
        wanted = range(rows.stop - rows.start) if wanted is None else wanted
        return slice(rows.start + wanted.start, rows.start + wanted.stop), None
    chosen = rows if wanted is None else rows[wanted.start : wanted.stop]
    first = int(chosen.min())
    return slice(first, int(chosen.max()) + 1), chosen - first


def source_of(stored: Stored, name: str, cut: Cut, shape: ModelShape) -> Cut:
    """Return the part of a file's tensor that the part `cut` of a canonical one is made of.

    Raises UnsupportedModel for a tensor that is made of a whole one.
    """
    if stored.make is None or cut == WHOLE:
        return cut
    if stored.made_of is None:
        raise UnsupportedModel(f"tensor {stored.name}: what is made of it is not read in parts")
    return Cut(*stored.made_of(field_of(name), (cut.rows, cut.columns), shape))


def check_columns(name: str, size: tuple[int, ...], cut: Cut) -> None:
    """Raise BadModelFile for a tensor of a file that ends before what is cut from it."""
    if cut.columns is not None and (len(size) < 2 or size[1] < cut.columns.stop):
        raise BadModelFile(
            f"tensor {name} is {size}: it has no columns {cut.columns.start}-{cut.columns.stop}"
        )
    if cut.rows is not None and size[0] < cut.rows.stop:
        raise BadModelFile(f"tensor {name} is {size}: it has no rows {cut.rows.start}-{cut.rows.stop}")
