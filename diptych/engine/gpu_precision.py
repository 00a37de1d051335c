"""Quantised matrices on a GPU: whether a model's are kept, and what is computed, in words."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import torch

from diptych.engine.backends.triton.supports import supports
from diptych.engine.weights import Matrix, Weights
from diptych.engine.weights.checkpoint import open_checkpoint, packs
from kernels.packed_matrix import PackedMatrix

_KINDS = {
    "int4": "4-bit codes",
    "table4": "4-bit codes by a table",
    "int8": "8-bit codes",
    "fp8": "FP8",
}


def packs_on_gpu(path: Path) -> bool:
    """Return whether a GPU step computes the model at `path` with the file's own codes.

    Raises FileNotFoundError, UnsupportedModel or BadModelFile.
    """
    return packs(path) and supports(open_checkpoint(path, "bf16").shape) is None


def describe_matrices(weights: Weights) -> str:
    """Return how many matrices of the layers are in which numbers, as "14 in 4-bit codes, groups of 128"."""
    kinds = Counter(_kind(matrix) for matrix in _matrices(weights))
    return "; ".join(f"{count} in {kind}" for kind, count in kinds.most_common())


def _kind(matrix: Matrix) -> str:
    if isinstance(matrix, PackedMatrix):
        groups = f"groups of {matrix.group}" if matrix.group < matrix.columns else "a scale for each output"
        return f"{_KINDS[matrix.code]}, {groups}{', reordered' if matrix.order is not None else ''}"
    return str(matrix.dtype).removeprefix("torch.") if isinstance(matrix, torch.Tensor) else "blocks"


def _matrices(weights: Weights) -> Iterator[Matrix]:
    """Yield the matrices that the GPU step multiplies as they are; experts' are full numbers there."""
    for layer in weights.layers:
        for matrix in (layer.q, layer.k, layer.v, layer.o, layer.gate, layer.up, layer.down):
            if matrix is not None:
                yield matrix
    yield weights.output_matrix()
