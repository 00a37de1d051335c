"""Linear layers over weights in quantised blocks, with activations quantised to 8 bits in groups.

A matrix `[rows, columns]` is cut along its columns (the depth of the product) into blocks of 32, each with a
scale of its own; formats and bytes are those of GGUF files (github.com/ggml-org/ggml, ggml-common.h), so that
a file's blocks are computed with as they are. Activations are quantised row by row in groups of the same 32:
one scale a row would not do, for a few activations of a transformer are a hundred times the others (Dettmers
et al. 2022). The groups that hold these get 16 bits a number.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

import torch
from torch.nn import functional

from kernels import kquants
from kernels.kquants import KQUANT_BYTES, SUPER, KQuantFormat

GROUP = 32
"""Numbers along the depth that share a scale."""

GroupFormat = Literal["q4_0", "q4_1", "q8_0", "iq4_nl", "mxfp4"]
BlockFormat = GroupFormat | KQuantFormat

BLOCK_BYTES: dict[GroupFormat, int] = {"q4_0": 18, "q4_1": 20, "q8_0": 34, "iq4_nl": 18, "mxfp4": 17}
"""Bytes of a block of 32; K-quants have blocks of 256 (kernels/kquants.py)."""


def block_of(name: BlockFormat) -> tuple[int, int]:
    """Return numbers and bytes of a block."""
    if name in BLOCK_BYTES:
        return GROUP, BLOCK_BYTES[name]
    if name in KQUANT_BYTES:
        return SUPER, KQUANT_BYTES[name]
    raise ValueError(f"no blocks of {name}")


E2M1: Final = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
TABLES: Final[dict[BlockFormat, tuple[float, ...]]] = {"iq4_nl": kquants.TABLE, "mxfp4": E2M1}
"""Formats of blocks of 32 whose codes are places in a table; MXFP4's are numbers of E2M1 (OCP Microscaling
Formats 1.0, 2023).
"""


FINE_ABOVE = 1.2
"""A group of activations whose peak is above this times the mean peak of its row gets 16 bits a number.

What rounding costs goes by the peak, and outliers keep to a few groups: a fifth of the groups of SmolLM2
takes seven eighths of the error away (mean KL 0.0033 to 0.0004 nats).
"""

_LEAST_PEAK = 1e-35
"""Below this the reciprocal of a scale overflows; such a group is zero for every purpose."""


@dataclass(frozen=True)
class BlockMatrix:
    """A matrix in blocks; the last block of a row is padded where 32 does not divide the columns."""

    format: BlockFormat
    columns: int
    blocks: torch.Tensor
    """uint8 `[rows, bytes of ceil(columns / numbers of a block) blocks]`."""

    def __post_init__(self) -> None:
        numbers, size = block_of(self.format)
        width = -(-self.columns // numbers) * size
        if self.blocks.dtype != torch.uint8 or self.blocks.ndim != 2 or self.blocks.shape[1] != width:
            raise ValueError(
                f"{self.columns} columns of {self.format} are not {tuple(self.blocks.shape)} bytes"
            )

    @property
    def shape(self) -> tuple[int, int]:
        """Size `(rows, columns)`."""
        return self.blocks.shape[0], self.columns

    def rows(self, rows: slice | torch.Tensor) -> BlockMatrix:
        """Return the chosen rows."""
        return BlockMatrix(self.format, self.columns, self.blocks[rows])

    def contiguous(self) -> BlockMatrix:
        """Return the matrix with its bytes row after row."""
        return BlockMatrix(self.format, self.columns, self.blocks.contiguous())


def quantise_matrix(matrix: torch.Tensor) -> BlockMatrix:
    """Quantise `matrix [rows, columns]` to q8_0: blocks of 32 numbers of -127 .. 127 and their scale."""
    rows, columns = matrix.shape
    groups = functional.pad(matrix.float(), (0, -columns % GROUP)).view(rows, -1, GROUP)
    # The scale is rounded to fp16 first, so that the numbers are the nearest to what will be computed with.
    scales = (groups.abs().amax(dim=-1, keepdim=True) / 127.0).half()
    steps = scales.float()
    values = torch.where(steps > 0, groups / steps, 0.0).round().clamp(-127, 127).to(torch.int8)
    parts = scales.view(torch.uint8), values.view(torch.uint8)
    return BlockMatrix("q8_0", columns, torch.cat(parts, dim=-1).view(rows, -1))


def dequantise(matrix: BlockMatrix) -> torch.Tensor:
    """Return the float32 numbers `[rows, columns]` that the blocks stand for, exactly."""
    if matrix.format in KQUANT_BYTES:
        blocks = matrix.blocks.reshape(-1, block_of(matrix.format)[1])
        values = kquants.dequantise_blocks(blocks, matrix.format)
    elif matrix.format == "q8_0":
        blocks = _in_blocks(matrix)
        values = _halves_as_floats(blocks[..., :2]) * blocks[..., 2:].view(torch.int8).float()
    elif (table := TABLES.get(matrix.format)) is not None:
        scale, codes = table_codes_of(matrix)
        values = scale * torch.tensor(table, dtype=torch.float32)[_halves(codes).long()]
    else:
        scale, least, codes = codes_of(matrix)
        # Q4_0 is defined by its offset: 8 is taken off as a whole number.
        offset = 8.0 if matrix.format == "q4_0" else 0.0
        values = scale * (_halves(codes) - offset)
        if matrix.format == "q4_1":
            values += least
    return values.reshape(matrix.shape[0], -1)[:, : matrix.columns].contiguous()


def codes_of(matrix: BlockMatrix) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return scale, codes and least of a matrix in q4_0 or q4_1, whose numbers are `scale * code + least`.

    Scale and least are float32 `[rows, groups, 1]`, codes those of the file, uint8 `[rows, groups, 16]`.
    """
    blocks = _in_blocks(matrix)
    scale = _halves_as_floats(blocks[..., :2])
    if matrix.format == "q4_1":
        return scale, _halves_as_floats(blocks[..., 2:4]), blocks[..., 4:]
    return scale, -8.0 * scale, blocks[..., 2:]


def table_codes_of(matrix: BlockMatrix) -> tuple[torch.Tensor, torch.Tensor]:
    """Return scale and codes of a matrix in iq4_nl or mxfp4, whose codes are places in a table.

    Scales are float32 `[rows, groups, 1]`, codes those of the file, uint8 `[rows, groups, 16]`.
    """
    blocks = _in_blocks(matrix)
    if matrix.format == "mxfp4":
        powers = blocks[..., :1].int() - 127
        return torch.ldexp(torch.ones(powers.shape), powers), blocks[..., 1:]
    return _halves_as_floats(blocks[..., :2]), blocks[..., 2:]


def _in_blocks(matrix: BlockMatrix) -> torch.Tensor:
    return matrix.blocks.contiguous().view(matrix.shape[0], -1, block_of(matrix.format)[1])


def _halves_as_floats(two_bytes: torch.Tensor) -> torch.Tensor:
    """Read half precision out of `[..., 2]` bytes: float32 `[..., 1]`."""
    return two_bytes.contiguous().view(torch.float16).float()


def _halves(packed: torch.Tensor) -> torch.Tensor:
    """Unpack `packed [..., 16]` to float32 `[..., 32]`: first all low halves of the bytes, then all high
    ones.
    """
    return torch.cat([packed & 15, packed >> 4], dim=-1).float()


def quantise_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise `x [rows, columns]` to whole numbers, int32 `[rows, groups, 32]`, and float32 scales of each
    group.

    Numbers have 8 bits, those of fine groups 16: a first byte of the rounded number and a second one of what
    that left over. The last group is padded with zeros. A group with an infinity or a NaN has the scale NaN.
    """
    groups = functional.pad(x.float(), (0, -x.shape[1] % GROUP)).view(x.shape[0], -1, GROUP)
    peak = groups.abs().amax(dim=-1, keepdim=True)
    finite = peak.isfinite()
    inverse = torch.where(finite & (peak > _LEAST_PEAK), 127.0 / peak, 0.0)
    fine = peak > FINE_ABOVE * peak.mean(dim=1, keepdim=True)
    scaled = torch.where(finite, groups * inverse, 0.0)
    first = scaled.round()
    second = ((scaled - first) * 256.0).round().clamp(-127, 127)
    values = torch.where(fine, 256.0 * first + second, first).to(torch.int32)
    steps = torch.where(fine, 127.0 * 256.0, 127.0)
    return values, torch.where(finite, peak / steps, torch.nan)


def quantised_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Multiply `x [rows, columns]`, quantised in groups, with the transpose of `weight [out, columns]`:
    float32.

    The reference: `weight` is dequantised, `bias` is `[out]`. Kernels keep the blocks and sum the whole
    numbers of each group exactly, which differs from this in the rounding of float32 sums only.
    """
    values, scales = quantise_rows(x)
    rounded = (values.float() * scales).reshape(x.shape[0], -1)[:, : x.shape[1]]
    return functional.linear(rounded, weight, bias)
