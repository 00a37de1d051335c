"""Choice of the product for matrices as they were read."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from diptych.engine.backends.triton.products.dense import Linear
from diptych.engine.backends.triton.products.joined import JoinedLinear
from diptych.engine.backends.triton.products.packed import PackedLinear
from diptych.engine.backends.triton.products.product import Product
from diptych.engine.models.shape import UnsupportedModel
from diptych.engine.weights import Matrix
from kernels.packed_matrix import PackedMatrix, dequantise, join

Part = tuple[Matrix, torch.Tensor | None]
"""A matrix and its bias."""


def quantised_product(device: torch.device, parts: Sequence[Part]) -> Product:
    """Return the product of matrices of one input, one of which is quantised: in one launch if it can be."""
    packed = [matrix for matrix, _ in parts if isinstance(matrix, PackedMatrix)]
    if len(packed) == len(parts) and (joined := join(packed)) is not None:
        biases = [bias.to(device) for _, bias in parts if bias is not None]
        return PackedLinear(joined.to(device), torch.cat(biases) if biases else None)
    return JoinedLinear(tuple(_one(device, matrix, bias) for matrix, bias in parts))


def _one(device: torch.device, matrix: Matrix, bias: torch.Tensor | None) -> Product | Linear:
    moved = None if bias is None else bias.to(device)
    if isinstance(matrix, PackedMatrix):
        return PackedLinear(matrix.to(device), moved)
    return Linear(dense_matrix(matrix).to(device), moved)


def dense_matrix(matrix: Matrix) -> torch.Tensor:
    """Return the full numbers of a matrix; packed ones are made bfloat16, for kernels that take no codes.

    Raises UnsupportedModel for the CPU's quantised forms.
    """
    if isinstance(matrix, PackedMatrix):
        return dequantise(matrix).to(torch.bfloat16)
    if not isinstance(matrix, torch.Tensor):
        raise UnsupportedModel("matrices in the blocks or bytes of the CPU step are multiplied on CPUs only")
    return matrix
