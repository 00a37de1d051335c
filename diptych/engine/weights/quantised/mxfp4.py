"""MXFP4 as gpt-oss' folders have it (OCP Microscaling Formats 1.0, 2023): experts' matrices in four bits.

Of a tensor `x` of all experts there are ``x_blocks`` uint8 `[experts, out, in / 32, 16]`, two numbers of E2M1
a byte, the lower four bits first, and ``x_scales`` uint8 `[experts, out, in / 32]`, powers of two plus 127.
Not quantised the tensor is `[experts, in, out]`: that is how it is read.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from diptych.engine.weights.canonical import BadModelFile
from diptych.engine.weights.quantised.region import Borders, columns, rows
from diptych.engine.weights.quantised.scheme import HeldTensors, Scheme, Tensors
from kernels.quantised_linear import BlockMatrix

_NUMBERS = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
_BIAS = 127
_BLOCK = 32
_BYTES = 16
"""Bytes of a block."""


class Mxfp4(Scheme):
    """Raises UnsupportedModel, naming the field."""

    keeps_codes = True
    has_tables = True
    packs = True
    parts = frozenset({"blocks", "scales"})
    marks = ("blocks",)

    def __init__(self, config: Mapping[str, Any]) -> None:
        """Take no more from `config`: the format has no parameters."""

    def size(self, matrix: str, tensors: Tensors) -> tuple[int, int]:
        """Return the size of the tensor that `read` gives, `[in, out]`."""
        size = tensors.size(name := f"{matrix}_scales")
        if len(size) != 2:
            raise BadModelFile(f"tensor {name} is {size}, not rows of scales")
        return size[1] * _BLOCK, size[0]

    def borders(self, matrix: str, tensors: Tensors) -> Borders:
        return _BLOCK, 1

    def read(self, matrix: str, tensors: Tensors) -> torch.Tensor:
        """Return the float32 numbers of one expert, `[in, out]`."""
        return numbers(*_blocks_and_scales(matrix, tensors)).T

    def read_blocks(self, matrix: str, tensors: Tensors) -> BlockMatrix:
        """Return the blocks of one expert, `[out, in]`, as GGUF files have them."""
        blocks, scales = _blocks_and_scales(matrix, tensors)
        codes = _codes(blocks)
        halves = codes[..., :_BYTES] | codes[..., _BYTES:] << 4
        of_rows = torch.cat([scales.unsqueeze(-1), halves], dim=-1).flatten(1)
        return BlockMatrix("mxfp4", _BLOCK * scales.shape[1], of_rows)

    def is_quantised(self, matrix: str, tensors: HeldTensors) -> bool:
        return tensors.has(f"{matrix}_blocks")

    def matrix_of(self, tensor: str) -> str | None:
        return next((tensor[: -len(part) - 1] for part in self.parts if tensor.endswith(f"_{part}")), None)


def _blocks_and_scales(matrix: str, tensors: Tensors) -> tuple[torch.Tensor, torch.Tensor]:
    """Read uint8 `[rows, n, 16]` and `[rows, n]`. Raises BadModelFile."""
    # Rows and columns are those of the tensor that is not quantised: `[in, out]`.
    blocks, scales = (
        tensors.read(f"{matrix}_{part}", columns(), rows(_BLOCK)) for part in ("blocks", "scales")
    )
    fitting = blocks.ndim == 3 and blocks.shape[-1] == _BYTES and blocks.shape[:-1] == scales.shape
    if not fitting or {blocks.dtype, scales.dtype} != {torch.uint8}:
        raise BadModelFile(
            f"blocks are {blocks.dtype} {tuple(blocks.shape)}, scales {scales.dtype} "
            f"{tuple(scales.shape)}: rows of 16 bytes and a byte for each were expected"
        )
    return blocks, scales


def _codes(blocks: torch.Tensor) -> torch.Tensor:
    """Return the codes `[rows, n, 32]` of `blocks [rows, n, 16]`."""
    return torch.stack([blocks & 15, blocks >> 4], dim=-1).flatten(-2)


def numbers(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Return the float32 numbers `[rows, n * 32]` of `blocks [rows, n, 16]` and `scales [rows, n]`, bytes."""
    codes = _codes(blocks)
    values = _NUMBERS[(codes & 7).long()]
    signed = torch.where(codes >= 8, -values, values)
    return torch.ldexp(signed, (scales.int() - _BIAS).unsqueeze(-1)).flatten(-2)
