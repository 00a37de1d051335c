"""A folder's quantised matrices by canonical name, whole or cut.

Of a matrix that is cut no more is read than the least rectangle around the part at whose borders the scheme's
tensors can be cut (`Scheme.borders`). What that has too much is taken off its full numbers, or off its codes,
whose groups are divided then.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from diptych.engine.dtype import PLAIN, Precision
from diptych.engine.models.family import Stored
from diptych.engine.models.shape import BadModelFile, UnsupportedModel
from diptych.engine.weights.block_quantised import blocks_in_precision, in_precision
from diptych.engine.weights.canonical import Matrix, field_of
from diptych.engine.weights.folder_places import Places
from diptych.engine.weights.quantised import Codes, Scheme
from diptych.engine.weights.quantised.region import Region
from diptych.engine.weights.reader import WHOLE, Cut, check_columns, rows_to_read, source_of
from diptych.engine.weights.tensor_files import MatrixTensors, TensorFiles
from kernels.packed_matrix import PackedMatrix
from kernels.scaled_matrix import ScaledMatrix


@dataclass(frozen=True)
class _Chosen:
    """Rectangle of a matrix that is read, and the part of it that is kept."""

    region: Region | None = None
    """Rectangle of the file's matrix; None: all of it."""
    rows: slice | torch.Tensor | None = None
    """Rows of the rectangle; None: all."""
    columns: slice | None = None


class QuantisedMatrices:
    """Reader of a folder's quantised matrices, as a precision stores them."""

    def __init__(
        self,
        tensors: TensorFiles,
        scheme: Scheme | None,
        precision: Precision,
        places: Places,
        *,
        tied: bool,
    ) -> None:
        self._tensors, self._scheme, self._precision = tensors, scheme, precision
        self._places, self._shape, self._tied = places, places.shape, tied

    def read(self, name: str, cut: Cut = WHOLE) -> Matrix | None:
        """Read a part of a matrix as the precision stores it; None if it is not quantised.

        Raises BadModelFile, and UnsupportedModel, naming the matrix, for codes that cannot be cut so.
        """
        if self._scheme is None or not self._is_quantised(name, self._scheme):
            return None
        if cut != WHOLE and self._precision == "gguf":
            raise UnsupportedModel(f"tensor {name} is not read in parts in gguf")
        matrix = self._places.matrix(name)
        try:
            return self._read(name, matrix, cut, self._scheme)
        except BadModelFile as error:
            raise BadModelFile(f"{matrix}: {error}") from error
        except _NotCut as error:
            raise UnsupportedModel(f"tensor {matrix}: {error}") from error

    def _read(self, name: str, matrix: str, cut: Cut, scheme: Scheme) -> Matrix:
        stored = self._places.of(name)
        chosen = _Chosen() if cut == WHOLE else self._chosen(name, stored, scheme, cut)
        tensors = MatrixTensors(self._tensors, stored.expert, chosen.region)
        if self._precision in ("gguf", "packed") and stored.block_rows is not None:
            blocks = scheme.read_blocks(matrix, tensors)
            if blocks is not None:
                kept = blocks_in_precision(blocks.rows(stored.block_rows(field_of(name))), self._precision)
                # Blocks lie the other way round: rows of the file's numbers are their columns.
                if isinstance(kept, PackedMatrix) and isinstance(chosen.rows, slice):
                    return _narrower(kept, chosen.rows)
                if kept is not None:
                    return kept
        found = (scheme.read_packed if self._precision == "packed" else scheme.read)(matrix, tensors)
        if cut == WHOLE:
            size = tuple(found.codes.shape if isinstance(found, Codes) else found.shape)
            chosen = _Chosen(rows=self._places.rows(name, stored, size))
        if stored.make is not None and not isinstance(found, torch.Tensor):
            raise UnsupportedModel(f"{matrix}: matrices of this kind are read of full numbers only")
        if isinstance(found, torch.Tensor):
            found = found if chosen.rows is None else found[chosen.rows]
            found = found if chosen.columns is None else found[:, chosen.columns]
            if stored.make is not None:
                found = stored.make(found, field_of(name), self._shape)
            return in_precision(name, found, self._precision)
        if chosen.rows is not None:
            found = found.rows(chosen.rows)
        if isinstance(found, Codes):
            return self._of_codes(name, found, chosen.columns, scheme, in_parts=cut != WHOLE)
        return found if chosen.columns is None else _narrower(found, chosen.columns)

    def _chosen(self, name: str, stored: Stored, scheme: Scheme, cut: Cut) -> _Chosen:
        """Return what is to be read for the part `cut` of a canonical matrix."""
        matrix, tensors = self._places.matrix(name), MatrixTensors(self._tensors, stored.expert)
        size = scheme.size(matrix, tensors)
        source = source_of(stored, name, cut, self._shape)
        check_columns(matrix, size, source)
        rows, order = rows_to_read(self._places.rows(name, stored, size), source)
        columns = range(size[1]) if source.columns is None else source.columns
        wanted = Region(range(size[0])[rows], columns)
        region = wanted.around(scheme.borders(matrix, tensors), size)
        own_rows, own_columns = wanted.within(region)
        return _Chosen(
            region,
            _unless_all(own_rows, len(region.rows)) if order is None else order + own_rows.start,
            _unless_all(own_columns, len(region.columns)),
        )

    def _of_codes(
        self, name: str, codes: Codes, columns: slice | None, scheme: Scheme, *, in_parts: bool
    ) -> Matrix:
        """Return codes as the precision stores them: as they are, if it has such and all that is multiplied
        together can be kept, else full numbers. Bytes of a CPU are rounded of each part's numbers.
        """
        own = codes if columns is None else codes.cut(columns)
        if self._precision == "packed":
            if own.is_part_of_order:
                raise _NotCut("inputs in an order of their own (act-order) are cut of full numbers only")
            packed = own.packed()
            if packed is None and columns is not None:
                raise _NotCut(f"groups of {codes.group} columns cannot be cut there and stay quantised")
            kept: Matrix | None = packed
        elif in_parts or self._precision in PLAIN or not scheme.keeps_codes:
            kept = None
        elif all(self._is_quantised(other, scheme) for other in self._places.together(name)):
            kept = blocks_in_precision(own.in_blocks(), self._precision)
        else:
            kept = None
        return in_precision(name, own.numbers(), self._precision) if kept is None else kept

    def _is_quantised(self, name: str, scheme: Scheme) -> bool:
        tied_head = name == "head" and self._tied
        return not tied_head and scheme.is_quantised(self._places.matrix(name), self._tensors)


class _NotCut(Exception):
    """Codes that cannot be cut to a part and stay codes."""


def _narrower(matrix: PackedMatrix | ScaledMatrix, columns: slice) -> PackedMatrix | ScaledMatrix:
    try:
        return matrix.cut(columns)
    except ValueError as error:
        raise _NotCut(str(error)) from error


def _unless_all(entries: slice, count: int) -> slice | None:
    return None if entries == slice(0, count) else entries
