"""Matrices as whole numbers with a scale and a zero for each group of columns."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch

from diptych.engine.weights.canonical import BadModelFile
from kernels import packed_matrix
from kernels.packed_matrix import PackedMatrix
from kernels.quantised_linear import GROUP, BlockMatrix

_BITS_OF_A_WORD = 32


@dataclass(frozen=True)
class Codes:
    """`scale * (code - zero)`, rows of outputs and columns of inputs.

    Args:
        codes: uint8 `[rows, columns]`.
        scales: of any floating type, `[rows, groups]`, or `[1, groups]` for all rows.
        zeros: whole numbers in any type, shaped as scales.
        group: columns of a group; the last may have fewer.
        group_of: int64 `[columns]`, where a group's columns do not lie together.
        columns: of the whole matrix, where `group_of` is that of some of them, with scales of all groups.

    Raises:
        BadModelFile: shapes that do not fit, or a group that does not exist.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor
    group: int
    group_of: torch.Tensor | None = None
    columns: int | None = None

    def __post_init__(self) -> None:
        rows, columns = self.codes.shape
        groups = -(-(self.columns or columns) // self.group)
        for name, tensor in (("scales", self.scales), ("zeros", self.zeros)):
            if tuple(tensor.shape) not in ((rows, groups), (1, groups)):
                raise BadModelFile(
                    f"{name} are {tuple(tensor.shape)}; {rows} rows with groups of {self.group} of "
                    f"{self.columns or columns} columns have ({rows}, {groups})"
                )
        order = self.group_of
        if order is not None and (order.shape != (columns,) or order.min() < 0 or order.max() >= groups):
            raise BadModelFile(f"g_idx does not name one of {groups} groups for each of {columns} columns")

    def numbers(self) -> torch.Tensor:
        """Return the float32 numbers `[rows, columns]` that the codes stand for."""
        numbers, zeros, scales = self.codes.float(), self.zeros.float(), self.scales.float()
        columns = numbers.shape[1]
        # In place: a matrix may well take a tenth of the memory that there is.
        if self.group_of is None and columns % self.group == 0:
            numbers.unflatten(1, (-1, self.group)).sub_(zeros[:, :, None]).mul_(scales[:, :, None])
            return numbers
        order = torch.arange(columns) // self.group if self.group_of is None else self.group_of
        return numbers.sub_(zeros[:, order]).mul_(scales[:, order])

    def rows(self, rows: slice | torch.Tensor) -> Codes:
        """Return the chosen rows."""
        scales, zeros = (
            tensor if len(tensor) == 1 and len(self.codes) > 1 else tensor[rows]
            for tensor in (self.scales, self.zeros)
        )
        return replace(self, codes=self.codes[rows], scales=scales, zeros=zeros)

    def cut(self, columns: slice) -> Codes:
        """Return the chosen columns; groups that they cut through are divided."""
        codes, (begin, _, _) = self.codes[:, columns], columns.indices(self.codes.shape[1])
        if self.group_of is not None:
            order, whole = self.group_of[columns], self.columns or self.codes.shape[1]
            return replace(self, codes=codes, group_of=order, columns=whole)
        group = math.gcd(self.group, begin)
        first, count = begin // group, -(-codes.shape[1] // group)
        scales, zeros = (
            tensor.repeat_interleave(self.group // group, 1)[:, first : first + count]
            for tensor in (self.scales, self.zeros)
        )
        return replace(self, codes=codes, scales=scales, zeros=zeros, group=group)

    @property
    def is_part_of_order(self) -> bool:
        """True for some columns of a matrix whose inputs have an order of their own."""
        return self.columns is not None and self.codes.shape[1] < self.columns

    def packed(self) -> PackedMatrix | None:
        """Return the same numbers as a GPU step reads them; None for groups that it does not pack."""
        code: packed_matrix.Code = "int4" if int(self.codes.max()) < 16 else "int8"
        return packed_matrix.pack(
            code, self.codes, self.scales, self.group, zeros=self.zeros, group_of=self.group_of
        )

    def in_blocks(self) -> BlockMatrix:
        """Return the codes in blocks of q4_1, if `fit_blocks`.

        Scales and ``-scale * zero`` are rounded to half precision there, which scales mostly have already.
        """
        rows, columns = self.codes.shape
        count = -(-columns // GROUP)
        of_block = torch.arange(count) * GROUP // self.group
        scales = self.scales.float().expand(rows, -1)[:, of_block]
        zeros = self.zeros.float().expand(rows, -1)[:, of_block]
        padded = torch.nn.functional.pad(self.codes, (0, count * GROUP - columns)).view(rows, count, GROUP)
        codes = padded[..., : GROUP // 2] | padded[..., GROUP // 2 :] << 4
        blocks = torch.cat([_halves(scales), _halves(-scales * zeros), codes], dim=-1)
        return BlockMatrix("q4_1", columns, blocks.view(rows, -1))


def fit_blocks(*, bits: int, group: int) -> bool:
    """Return whether such codes can be kept in blocks of 32; `group` 0 or less: one for all columns."""
    return bits == 4 and (group <= 0 or group % GROUP == 0)


def unpacked(words: torch.Tensor, bits: int, dim: int) -> torch.Tensor:
    """Whole numbers of `bits` bits out of int32 `words`, those of a word one after another along `dim`, from
    its lowest bits on: uint8. Raises BadModelFile for words that are none.
    """
    if words.dtype != torch.int32 or words.ndim != 2:
        raise BadModelFile(f"packed numbers are {words.dtype} {tuple(words.shape)}, not rows of int32")
    # One place after the other: all of them at once would be four times as large until they are bytes.
    shifts = range(0, _BITS_OF_A_WORD, bits)
    places = [(words >> shift & (1 << bits) - 1).to(torch.uint8) for shift in shifts]
    return torch.stack(places, dim=dim + 1).flatten(dim, dim + 1)


def _halves(numbers: torch.Tensor) -> torch.Tensor:
    """Half precision `[...]` as bytes `[..., 2]`."""
    return numbers.half().unsqueeze(-1).contiguous().view(torch.uint8)
