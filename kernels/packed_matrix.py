"""Matrices in packed codes of four or eight bits, as GPU kernels read them: one layout for every file format.

A number is `scale * (value(code) - zero)` or `scale * value(code) + least`; scale, zero and least belong to a
group of neighbouring columns of one row. AWQ, GPTQ, compressed-tensors, GGUF's blocks, NF4 and FP8 without
rounded activations all are of this kind, so that a file is repacked once, when it is loaded, and stays
packed.

The layout is that of the reader: a program takes some rows and walks along the columns, so bytes are
`[tiles, rows, bytes]` with a tile of `2 * run` columns, and scales `[groups, rows]`. What a step of the walk
reads lies in one piece. The low halves of a tile's bytes are its first `run` columns, the high halves its
last: a program multiplies two whole runs, and interleaves nothing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

import torch
from torch.nn import functional

from kernels import kquants
from kernels.kquants import KQUANT_BYTES, KQuantFormat
from kernels.quantised_linear import E2M1, BlockMatrix, block_of, codes_of, table_codes_of

Code = Literal["int4", "table4", "fp4", "int8", "fp8"]
"""Whole numbers of four bits, places in a table of sixteen, E2M1, whole numbers of eight bits, E4M3."""

_RUNS = (128, 64, 32)
_SHORT_RUN = 16
_FOUR_BITS = ("int4", "table4", "fp4")
_PADDING = 16
"""A long run may add at most a sixteenth of the columns to a matrix."""


@dataclass(frozen=True)
class PackedMatrix:
    """A matrix `[rows, columns]` in codes; see the module's docstring."""

    code: Code
    columns: int
    group: int
    """Columns that share a scale; the last group may have fewer."""
    codes: torch.Tensor
    """uint8 `[tiles, rows, run]` of four bits, `[tiles, rows, 2 * run]` of eight; padded with zeros."""
    scales: torch.Tensor
    """`[groups, rows]`, floating; or int8 multipliers of `supers`."""
    zero: int = 0
    """The zero of all groups where `zeros` is None."""
    zeros: torch.Tensor | None = None
    """uint8 `[groups, rows]`."""
    least: torch.Tensor | None = None
    """Added to `scale * value(code)` in place of a zero; as `scales`, or multipliers of `super_least`."""
    supers: torch.Tensor | None = None
    """float16 `[ceil(groups / supers_of), rows]`."""
    super_least: torch.Tensor | None = None
    supers_of: int = 1
    """Groups that share an entry of `supers`."""
    table: torch.Tensor | None = None
    """float32 `[16]`: the value of each code of `table4`."""
    order: torch.Tensor | None = None
    """int32 `[columns]`: the input that each column is multiplied with, where the file reorders them."""

    def __post_init__(self) -> None:
        tiles, rows, width = self.codes.shape
        groups = -(-self.columns // self.group)
        if width != self.run * (1 if self.four_bits else 2) or tiles != -(-self.columns // (2 * self.run)):
            raise ValueError(f"codes are {tuple(self.codes.shape)}, not those of {self.columns} columns")
        for name in ("scales", "zeros", "least"):
            found = getattr(self, name)
            if found is not None and tuple(found.shape) != (groups, rows):
                raise ValueError(f"{name} are {tuple(found.shape)}, not {(groups, rows)}")

    @property
    def run(self) -> int:
        """Columns that are multiplied at once: a group never ends within them."""
        return run_of(self.columns, self.group)

    @property
    def four_bits(self) -> bool:
        return self.code in _FOUR_BITS

    @property
    def shape(self) -> tuple[int, int]:
        """Size `(rows, columns)`."""
        return self.codes.shape[1], self.columns

    @property
    def device(self) -> torch.device:
        return self.codes.device

    @property
    def nbytes(self) -> int:
        """Bytes of all its tensors."""
        return sum(tensor.nbytes for tensor in self._tensors().values())

    def contiguous(self) -> PackedMatrix:
        """Return the matrix with every tensor in one piece."""
        return self._with({name: tensor.contiguous() for name, tensor in self._tensors().items()})

    def to(self, device: torch.device) -> PackedMatrix:
        """Return the matrix on `device`."""
        return self._with({name: one.to(device).contiguous() for name, one in self._tensors().items()})

    def rows(self, rows: slice | torch.Tensor) -> PackedMatrix:
        """Return the chosen rows."""
        own = {name: tensor[:, rows] for name, tensor in self._tensors().items() if tensor.ndim > 1}
        return self._with(own).contiguous()

    def cut(self, columns: slice) -> PackedMatrix:
        """Return the chosen columns, a run of them, with the same numbers: groups, and those that share an
        entry of `supers`, are divided where a border goes through them.

        Raises ValueError for a border that is no multiple of 16 inside a group, and for inputs in an order
        of their own, which lie anywhere.
        """
        begin, end, _ = columns.indices(self.columns)
        if (begin, end) == (0, self.columns):
            return self
        if self.order is not None:
            raise ValueError("columns with inputs in an order of their own are not cut")
        group = math.gcd(self.group, begin)
        if begin // self.group == (end - 1) // self.group:  # all in one group
            group = end - begin
        ratio, count = max(self.group // group, 1), -(-(end - begin) // group)
        of = (begin + torch.arange(count, device=self.device) * group) // self.group
        supers_of = math.gcd(self.supers_of * ratio, begin // group) if count > 1 else 1
        found: dict[str, Any] = {
            name: getattr(self, name)[of]
            for name in ("scales", "zeros", "least")
            if getattr(self, name) is not None
        }
        found |= {
            name: getattr(self, name)[of[::supers_of] // self.supers_of]
            for name in ("supers", "super_least")
            if getattr(self, name) is not None
        }
        codes = code_bytes(self)[:, begin:end]
        packed = pack_bytes(codes, run_of(end - begin, group), four=self.four_bits)
        if self.supers is None:
            supers_of = 1
        return replace(self, columns=end - begin, group=group, codes=packed, supers_of=supers_of, **found)

    def _with(self, tensors: Mapping[str, Any]) -> PackedMatrix:
        return replace(self, **tensors)

    def _tensors(self) -> dict[str, torch.Tensor]:
        found = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in found.items() if isinstance(value, torch.Tensor)}


def run_of(columns: int, group: int) -> int:
    """Return the columns of a run: as many of 128, 64 and 32 as a group has whole, 16 where groups are as
    short as that (K-quants). A product reads scales once a run.

    Raises ValueError for groups that end within 16 columns.
    """
    one = group >= columns
    fitting = [run for run in _RUNS if one or group % run == 0]
    for run in fitting:
        if -columns % (2 * run) <= columns // _PADDING:
            return run
    if fitting:
        return fitting[-1]
    if group % _SHORT_RUN:
        raise ValueError(f"groups of {group} columns are not whole runs of {_SHORT_RUN}")
    return _SHORT_RUN


def pack(
    code: Code,
    codes: torch.Tensor,
    scales: torch.Tensor,
    group: int,
    *,
    zeros: torch.Tensor | None = None,
    zero: int = 0,
    table: torch.Tensor | None = None,
    group_of: torch.Tensor | None = None,
) -> PackedMatrix | None:
    """Pack uint8 `codes [rows, columns]` with `scales` (and `zeros`) `[rows, groups]`, or `[1, groups]`.

    `group_of [columns]` names the group of each column where groups do not lie together; columns are sorted
    by it. None for groups that cannot be packed: of unequal sizes, or that end within 16 columns.
    """
    rows, columns = codes.shape
    order = None
    if group_of is not None:
        order = torch.argsort(group_of, stable=True)
        if not torch.equal(group_of[order], torch.arange(columns) // group):
            return None
        codes = codes[:, order]
    try:
        packed = pack_bytes(codes, run_of(columns, group), four=code in _FOUR_BITS)
    except ValueError:
        return None

    def by_group(numbers: torch.Tensor) -> torch.Tensor:
        return numbers.expand(rows, -1).T.contiguous()

    if zeros is not None and bool((zeros == zeros.flatten()[0]).all()):
        zero, zeros = int(zeros.flatten()[0]), None
    return PackedMatrix(
        code, columns, min(group, columns), packed, by_group(scales), zero=zero, table=table,
        zeros=None if zeros is None else by_group(zeros.to(torch.uint8)),
        order=None if order is None else order.to(torch.int32),
    )  # fmt: skip


def pack_bytes(codes: torch.Tensor, run: int, *, four: bool) -> torch.Tensor:
    """Return uint8 `codes [rows, columns]` as `PackedMatrix.codes` has them."""
    rows, columns = codes.shape
    halves = functional.pad(codes, (0, -columns % (2 * run))).view(rows, -1, 2, run)
    tiles = halves[:, :, 0] | halves[:, :, 1] << 4 if four else halves.flatten(2)
    return tiles.transpose(0, 1).contiguous()


def from_blocks(matrix: BlockMatrix) -> PackedMatrix | None:
    """Return a GGUF file's blocks as packed codes with the same numbers.

    Codes of up to four bits are kept in four, of five to eight in eight; scales of MXFP4, powers of two, in
    bfloat16, which has all of them. None for columns that are not whole blocks.
    """
    rows, columns = matrix.shape
    numbers, size = block_of(matrix.format)
    if columns % numbers:
        return None
    if matrix.format in KQUANT_BYTES:
        return _from_kquants(matrix, matrix.format, rows, columns)
    blocks = matrix.blocks.contiguous().view(rows, -1, size)
    if matrix.format == "q8_0":
        codes = (blocks[..., 2:].view(torch.int8).int() + 128).to(torch.uint8).flatten(1)
        return pack("int8", codes, _halves(blocks[..., :2]), numbers, zero=128)
    if matrix.format in ("iq4_nl", "mxfp4"):
        scale, halves = table_codes_of(matrix)
        codes = torch.cat([halves & 15, halves >> 4], dim=-1).flatten(1)
        if matrix.format == "mxfp4":
            return pack("fp4", codes, scale.squeeze(-1).bfloat16(), numbers)
        table = torch.tensor(kquants.TABLE, dtype=torch.float32)
        return pack("table4", codes, scale.squeeze(-1).half(), numbers, table=table)
    _, _, halves = codes_of(matrix)
    codes = torch.cat([halves & 15, halves >> 4], dim=-1).flatten(1)
    found = pack("int4", codes, _halves(blocks[..., :2]), numbers, zero=8)
    if found is None or matrix.format == "q4_0":
        return found
    return replace(found, zero=0, least=_halves(blocks[..., 2:4]).T.contiguous())


def _halves(two_bytes: torch.Tensor) -> torch.Tensor:
    """Read float16 out of `[rows, blocks, 2]` bytes: `[rows, blocks]`."""
    return two_bytes.contiguous().view(torch.float16).squeeze(-1)


_KQUANT_CODES: dict[str, tuple[Code, int]] = {
    "q2_k": ("int4", 0),
    "q3_k": ("int4", 4),
    "q4_k": ("int4", 0),
    "q5_k": ("int8", 0),
    "q6_k": ("int8", 32),
    "iq4_xs": ("table4", 0),
}
"""Code of each format, and what its reader takes off."""


def _from_kquants(matrix: BlockMatrix, name: KQuantFormat, rows: int, columns: int) -> PackedMatrix:
    code, zero = _KQUANT_CODES[name]
    parts = kquants.parts_of(matrix.blocks.reshape(-1, KQUANT_BYTES[name]), name)
    count = parts.scales.shape[1]
    group = kquants.SUPER // count

    def by_group(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return values.reshape(rows, -1).T.to(dtype).contiguous()

    table = None
    values = parts.codes.reshape(rows, columns)
    if code == "table4":
        table = torch.tensor(kquants.TABLE, dtype=torch.float32)
        values = torch.searchsorted(table, values)
    codes = (values + zero).to(torch.uint8)
    return PackedMatrix(
        code, columns, group, pack_bytes(codes, run_of(columns, group), four=code != "int8"),
        by_group(parts.scales, torch.int8), zero=zero, table=table, supers_of=count,
        supers=by_group(parts.d, torch.float16),
        least=None if parts.least is None else by_group(parts.least, torch.int8),
        super_least=None if parts.dmin is None else -by_group(parts.dmin, torch.float16),
    )  # fmt: skip


def are_alike(parts: Sequence[PackedMatrix]) -> bool:
    """Return whether matrices can be multiplied in one launch (`join`)."""
    first = parts[0]
    if any(_kind(part) != _kind(first) for part in parts):
        return False
    for name in ("table", "order"):
        mine = getattr(first, name)
        for part in parts:
            its = getattr(part, name)
            if (mine is None) != (its is None) or (mine is not None and not torch.equal(mine, its)):
                return False
    return True


def join(parts: Sequence[PackedMatrix]) -> PackedMatrix | None:
    """Return matrices of one input as one, rows after rows; None for matrices that are not alike."""
    if not are_alike(parts):
        return None
    if len({(part.zero, part.zeros is None) for part in parts}) > 1:
        parts = [_with_zeros(part) for part in parts]
    joined = {
        name: torch.cat([getattr(part, name) for part in parts], dim=1)
        for name, tensor in parts[0]._tensors().items()
        if tensor.ndim > 1
    }
    return parts[0]._with(joined)


def _kind(matrix: PackedMatrix) -> tuple[object, ...]:
    """Return what two matrices must share to be multiplied in one launch."""
    return (
        matrix.code, matrix.columns, matrix.group, matrix.supers_of, matrix.scales.dtype,
        matrix.least is None, matrix.super_least is None,
    )  # fmt: skip


def _with_zeros(matrix: PackedMatrix) -> PackedMatrix:
    if matrix.zeros is not None or matrix.least is not None:
        return matrix
    zeros = torch.full(matrix.scales.shape, matrix.zero, dtype=torch.uint8, device=matrix.device)
    return replace(matrix, zero=0, zeros=zeros)


def code_bytes(matrix: PackedMatrix) -> torch.Tensor:
    """Return the codes of a matrix as uint8 `[rows, columns]`, whatever bits they take."""
    tiles, rows, _ = matrix.codes.shape
    codes = matrix.codes
    if matrix.four_bits:
        codes = torch.cat([codes & 15, codes >> 4], dim=-1)
    return codes.transpose(0, 1).reshape(rows, tiles * 2 * matrix.run)[:, : matrix.columns]


def dequantise(matrix: PackedMatrix) -> torch.Tensor:
    """Return the float32 numbers `[rows, columns]` that the codes stand for, by the input's order."""
    codes = code_bytes(matrix)
    of = torch.arange(matrix.columns, device=codes.device) // matrix.group

    def of_columns(numbers: torch.Tensor, supers: torch.Tensor | None) -> torch.Tensor:
        own = numbers.float()
        if supers is not None:
            own = supers.float().repeat_interleave(matrix.supers_of, 0)[: len(own)] * own
        return own[of].T

    scales = of_columns(matrix.scales, matrix.supers)
    values = _values(matrix, codes)
    if matrix.least is not None:
        numbers = scales * values + of_columns(matrix.least, matrix.super_least)
    else:
        zeros = float(matrix.zero) if matrix.zeros is None else of_columns(matrix.zeros, None)
        numbers = scales * (values - zeros)
    if matrix.order is None:
        return numbers.contiguous()
    return torch.empty_like(numbers).index_copy_(1, matrix.order.long(), numbers)


def _values(matrix: PackedMatrix, codes: torch.Tensor) -> torch.Tensor:
    if matrix.code == "fp8":
        return codes.contiguous().view(torch.float8_e4m3fn).float()
    if matrix.code == "fp4":
        return torch.tensor(E2M1, device=codes.device)[codes.long()]
    return codes.float() if matrix.table is None else matrix.table[codes.long()]


def packed_linear(x: torch.Tensor, weight: PackedMatrix, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Multiply `x [T, columns]` with the transpose of `weight`, and add `bias [rows]`: float32 `[T, rows]`.

    The reference: numbers are rounded to the type of `x`, as a GPU's matrix instructions take them.
    """
    numbers = dequantise(weight).to(x.dtype).float()
    return functional.linear(x.float(), numbers, None if bias is None else bias.float())
