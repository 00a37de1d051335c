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
from diptych.engine.weights.quantised.scheme import Scheme, Tensors
from kernels.quantised_linear import BlockMatrix

_NUMBERS = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
_BIAS = 127
_BYTES = 16
"""Bytes of a block of 32 numbers."""


class Mxfp4(Scheme):
    """Raises UnsupportedModel, naming the field."""

    keeps_codes = True
    has_tables = True
    packs = True
    parts = frozenset({"blocks", "scales"})
    marks = ("blocks",)

    def __init__(self, config: Mapping[str, Any]) -> None:
        """Take no more from `config`: the format has no parameters."""

    def read(self, matrix: str, tensors: Tensors) -> torch.Tensor:
        """Return the float32 numbers of one expert, `[in, out]`."""
        return numbers(*_blocks_and_scales(matrix, tensors)).T

    def read_blocks(self, matrix: str, tensors: Tensors) -> BlockMatrix:
        """Return the blocks of one expert, `[out, in]`, as GGUF files have them."""
        blocks, scales = _blocks_and_scales(matrix, tensors)
        codes = _codes(blocks)
        halves = codes[..., :_BYTES] | codes[..., _BYTES:] << 4
        rows = torch.cat([scales.unsqueeze(-1), halves], dim=-1).flatten(1)
        return BlockMatrix("mxfp4", 2 * _BYTES * scales.shape[1], rows)

    def is_quantised(self, matrix: str, tensors: Tensors) -> bool:
        return tensors.has(f"{matrix}_blocks")

    def matrix_of(self, tensor: str) -> str | None:
        return next((tensor[: -len(part) - 1] for part in self.parts if tensor.endswith(f"_{part}")), None)


def _blocks_and_scales(matrix: str, tensors: Tensors) -> tuple[torch.Tensor, torch.Tensor]:
    """Read uint8 `[rows, n, 16]` and `[rows, n]`. Raises BadModelFile."""
    blocks, scales = (tensors.read(f"{matrix}_{part}") for part in ("blocks", "scales"))
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
