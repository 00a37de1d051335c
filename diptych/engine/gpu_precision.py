"""Quantised matrices on a GPU: whether a model's are kept, and what is computed, in words."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import torch

from diptych.engine.backends.triton.products.scaled_mm import has_fp8
from diptych.engine.backends.triton.supports import supports
from diptych.engine.weights import Matrix, Weights
from diptych.engine.weights.checkpoint import open_checkpoint, packs
from kernels.packed_matrix import PackedMatrix
from kernels.scaled_matrix import FP8, ScaledMatrix

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


def describe_matrices(weights: Weights, device: torch.device) -> str:
    """Return how many matrices are multiplied in which numbers, as "224 in 4-bit codes, groups of 128"."""
    kinds = Counter(_kind(matrix, device) for matrix in _matrices(weights))
    return "; ".join(f"{count} in {kind}" for kind, count in kinds.most_common())


def _kind(matrix: Matrix, device: torch.device) -> str:
    if isinstance(matrix, ScaledMatrix):
        name = _KINDS["fp8" if matrix.values.dtype == FP8 else "int8"]
        if name == "FP8" and not has_fp8(device):
            return f"{name}, inputs not rounded: this card has no FP8"
        scales = "squares of 128" if matrix.squares else "a scale for each output"
        return f"{name} and inputs too, {scales}{'' if matrix.static is None else ', inputs by a fixed one'}"
    if isinstance(matrix, PackedMatrix):
        groups = f"groups of {matrix.group}" if matrix.group < matrix.columns else "a scale for each output"
        return f"{_KINDS[matrix.code]}, {groups}{', reordered' if matrix.order is not None else ''}"
    return str(matrix.dtype).removeprefix("torch.") if isinstance(matrix, torch.Tensor) else "blocks"


def _matrices(weights: Weights) -> Iterator[Matrix]:
    """Yield the matrices that the GPU step multiplies as they are; routed experts' are full numbers there."""
    for layer in weights.layers:
        found = [layer.q, layer.k, layer.v, layer.o, layer.gate, layer.up, layer.down]
        if (experts := layer.experts) is not None:
            found += [experts.shared_gate, experts.shared_up, experts.shared_down]
        yield from (matrix for matrix in found if matrix is not None)
    yield weights.output_matrix()
