"""Rotary tables of a native model: of positions in a row, and for one step of positions on grids."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt
import torch

from diptych.engine.backends.native.batch import positions_of
from diptych.engine.backends.native.packing import rotary_tables
from diptych.engine.backends.native.status import NativeError, check
from diptych.engine.batch import SequenceStep, rotary_positions
from diptych.engine.models.shape import ModelShape
from kernels.cpu import library as native

Turns = npt.NDArray[np.int64]
"""The row in the tables of each token of a step."""
FIRST_POSITIONS = 32_768
"""Positions whose rotary tables are made at once: 8 MB for heads of 64. Longer contexts pay as they run."""


class Rotations:
    """Cosines and sines of all rotations of a model, where its steps read them."""

    def __init__(self, library: ctypes.CDLL, model: int, shape: ModelShape) -> None:
        """Make those of the first positions of the model with this handle. Raises NativeError."""
        self._library, self._model, self._shape = library, model, shape
        self.positions = 0
        """Positions that the tables reach."""
        self.reach(min(FIRST_POSITIONS, shape.max_context))

    def reach(self, positions: int) -> None:
        """Make tables for at least `positions` positions; they double so that they are seldom made.

        A running step reads those that there were. Raises NativeError.
        """
        if positions <= self.positions:
            return
        count = max(positions, 2 * self.positions)
        tables = rotary_tables(self._shape, torch.arange(count))
        self._set(tables, count)
        self.tables = tables
        self.positions = count

    @contextlib.contextmanager
    def of_step(self, sequences: Sequence[SequenceStep], *, alone: bool) -> Iterator[Turns | None]:
        """Set the tables that a step needs, and yield the row in them of each token; None: its place.

        Positions on grids have tables of their own, a row a token, so that such a step has to be `alone`:
        no launched one reads tables meanwhile. Raises NativeError.
        """
        if not on_grids(sequences):
            self.reach(positions_of(sequences))
            yield turns_of(sequences)
            return
        if not alone:
            raise NativeError("a step of positions on grids cannot follow launched ones")
        positions = torch.from_numpy(rotary_positions(sequences))
        own = rotary_tables(self._shape, positions)
        turns = np.arange(positions.shape[-1])
        self._set(own, len(turns))
        try:
            yield turns
        finally:
            self._set(self.tables, self.positions)

    def _set(self, tables: Sequence[tuple[torch.Tensor, torch.Tensor]], count: int) -> None:
        addresses = [native.Rotation(cosines.data_ptr(), sines.data_ptr()) for cosines, sines in tables]
        array = (native.Rotation * len(tables))(*addresses)
        check(self._library, self._library.diptych_set_rotations(self._model, array, len(tables), count))


def on_grids(sequences: Sequence[SequenceStep]) -> bool:
    """Return whether some tokens of a step have three positions."""
    return any(step.grid is not None for step in sequences)


def turns_of(sequences: Sequence[SequenceStep]) -> Turns | None:
    """Return the rotary positions of a batch's tokens, where some are not their places."""
    return rotary_positions(sequences) if any(step.shift for step in sequences) else None
