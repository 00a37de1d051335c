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
FP8_INPUTS = "DIPTYCH_FP8_INPUTS"
"""`fp8` rounds many rows of inputs of FP8 matrices, `16` none: nearer to the weights, and as slow as bf16."""


def rounds_inputs(device: torch.device, environment: Mapping[str, str] = os.environ) -> bool:
    """Return whether inputs of FP8 matrices may be rounded on a device: it can, and nothing else is asked.

    Raises UnsupportedModel for another word of the environment.
    """
    asked = environment.get(FP8_INPUTS) or "fp8"
    if asked not in ("fp8", "16"):
        raise UnsupportedModel(f"{FP8_INPUTS} is {asked!r}: it must be fp8 or 16")
    return asked == "fp8" and has_fp8(device)


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
    """Return FP8 as codes, whose inputs are multiplied as they are, where these are not to be rounded."""
    if isinstance(matrix, ScaledMatrix) and matrix.values.dtype == FP8 and not rounds_inputs(device):
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
