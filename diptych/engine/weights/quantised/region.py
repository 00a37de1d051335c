"""Rectangles of a matrix, and how the tensors of a quantised one lie along its rows and columns.

A scheme says of every tensor that it reads what its axes are (`Tensors.read`): AWQ's words
``[in, out / 8]``, say, are `columns()` and `rows(8)`, its scales ``[in / group, out]`` `columns(group)` and
`rows()`. So one method reads a whole matrix or any rectangle whose borders are borders of all its tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Axis:
    """Axis of a tensor: an entry for each `count` rows or columns of the matrix."""

    along: Literal["rows", "columns"]
    count: int = 1


WHOLE_AXIS = None
"""An axis whose every entry belongs to all of the matrix."""
Axes = Sequence[Axis | None]
Borders = tuple[int, int]
"""Numbers of rows and of columns to whose multiples a matrix can be cut in its file."""


def rows(count: int = 1) -> Axis:
    """Return an axis with an entry for `count` rows."""
    return Axis("rows", count)


def columns(count: int = 1) -> Axis:
    """Return an axis with an entry for `count` columns."""
    return Axis("columns", count)


@dataclass(frozen=True)
class Region:
    """Rectangle of a matrix."""

    rows: range
    columns: range

    def entries(self, axis: Axis | None) -> slice:
        """Return the entries of an axis that belong to this rectangle, whose borders are theirs."""
        if axis is None:
            return slice(None)
        side = self.rows if axis.along == "rows" else self.columns
        return slice(side.start // axis.count, -(-side.stop // axis.count))

    def around(self, borders: Borders, size: tuple[int, int]) -> Region:
        """Return the least rectangle around this one at `borders` of a matrix of `size`."""
        sides = zip((self.rows, self.columns), borders, size, strict=True)
        return Region(*(_around(*side) for side in sides))

    def within(self, other: Region) -> tuple[slice, slice]:
        """Return the rows and columns of `other` that are this rectangle."""
        pairs = ((self.rows, other.rows), (self.columns, other.columns))
        return _moved(*pairs[0]), _moved(*pairs[1])


def _around(side: range, unit: int, size: int) -> range:
    return range(side.start // unit * unit, min(-(-side.stop // unit) * unit, size))


def _moved(side: range, other: range) -> slice:
    return slice(side.start - other.start, side.stop - other.start)
