"""Choice of the product for matrices as they were read."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

import torch

from diptych.engine.backends.triton.products.dense import Linear
from diptych.engine.backends.triton.products.joined import JoinedLinear
from diptych.engine.backends.triton.products.packed import PackedLinear
from diptych.engine.backends.triton.products.product import Product
from diptych.engine.backends.triton.products.scaled import ScaledLinear
from diptych.engine.backends.triton.products.scaled_mm import has_fp8
from diptych.engine.models.shape import UnsupportedModel
from diptych.engine.weights import Matrix
from kernels import packed_matrix, scaled_matrix
from kernels.packed_matrix import PackedMatrix
from kernels.scaled_matrix import FP8, ScaledMatrix

Part = tuple[Matrix, torch.Tensor | None]
"""A matrix and its bias."""
INPUT_ROUNDING = "DIPTYCH_INPUT_ROUNDING"
"""`auto` rounds inputs of FP8 and int8 matrices, `off` none: nearer to the weights, slower in prompts."""


def rounds_inputs(
    dtype: torch.dtype, device: torch.device, environment: Mapping[str, str] = os.environ
) -> bool:
    """Return whether inputs of matrices in `dtype` may be rounded on a device: it can, and it is not off.

    Raises UnsupportedModel for another word of the environment.
    """
    asked = environment.get(INPUT_ROUNDING) or "auto"
    if asked not in ("auto", "off"):
        raise UnsupportedModel(f"{INPUT_ROUNDING} is {asked!r}: it must be auto or off")
    return asked == "auto" and (dtype != FP8 or has_fp8(device))


def quantised_product(device: torch.device, parts: Sequence[Part]) -> Product:
    """Return the product of matrices of one input, one of which is quantised: in one launch if it can be."""
    matrices = [_for_device(matrix, device) for matrix, _ in parts]
    biases = [bias.to(device) for _, bias in parts if bias is not None]
    bias = torch.cat(biases) if biases else None
    packed = [matrix for matrix in matrices if isinstance(matrix, PackedMatrix)]
    if len(packed) == len(parts) and (joined := packed_matrix.join(packed)) is not None:
        return PackedLinear(joined.to(device), bias)
    scaled = [matrix for matrix in matrices if isinstance(matrix, ScaledMatrix)]
    if len(scaled) == len(parts) and (one := scaled_matrix.join(scaled)) is not None:
        return ScaledLinear(one.to(device), bias)
    biases_of = [bias for _, bias in parts]
    return JoinedLinear(tuple(_one(device, *pair) for pair in zip(matrices, biases_of, strict=True)))


def _for_device(matrix: Matrix, device: torch.device) -> Matrix:
    """Return FP8 and int8 as codes, whose inputs are multiplied as they are, where none are to be rounded."""
    if isinstance(matrix, ScaledMatrix) and not rounds_inputs(matrix.values.dtype, device):
        return scaled_matrix.weights_only(matrix)
    return matrix


def _one(device: torch.device, matrix: Matrix, bias: torch.Tensor | None) -> Product | Linear:
    moved = None if bias is None else bias.to(device)
    if isinstance(matrix, PackedMatrix):
        return PackedLinear(matrix.to(device), moved)
    if isinstance(matrix, ScaledMatrix):
        return ScaledLinear(matrix.to(device), moved)
    return Linear(dense_matrix(matrix).to(device), moved)


def dense_matrix(matrix: Matrix) -> torch.Tensor:
    """Return the full numbers of a matrix; quantised ones are made bfloat16, for kernels that take no codes.

    Raises UnsupportedModel for the CPU's quantised forms.
    """
    if isinstance(matrix, PackedMatrix):
        return packed_matrix.dequantise(matrix).to(torch.bfloat16)
    if isinstance(matrix, ScaledMatrix):
        return scaled_matrix.dequantise(matrix).to(torch.bfloat16)
    if not isinstance(matrix, torch.Tensor):
        raise UnsupportedModel("matrices in the blocks or bytes of the CPU step are multiplied on CPUs only")
    return matrix
