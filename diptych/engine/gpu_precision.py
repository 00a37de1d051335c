"""Quantised matrices on a GPU: whether a model's are kept, and what is computed, in words."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import torch

from diptych.engine.backends.triton.products.make import INPUT_ROUNDING, rounds_inputs
from diptych.engine.backends.triton.products.scaled_mm import has_fp8
from diptych.engine.backends.triton.supports import supports
from diptych.engine.weights import ExpertWeights, Matrix, Weights
from diptych.engine.weights.checkpoint import open_checkpoint, packs
from kernels.packed_matrix import PackedMatrix
from kernels.packed_stack import as_codes, lacks
from kernels.scaled_matrix import FP8, ScaledMatrix

_KINDS = {
    "int4": "4-bit codes",
    "table4": "4-bit codes by a table",
    "fp4": "FP4 (E2M1)",
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
    found = [f"{count} in {kind}" for kind, count in kinds.most_common()]
    routed = Counter(kind for layer in weights.layers for kind in _of_experts(layer.experts))
    return "; ".join([*found, *(f"{count} of experts in {kind}" for kind, count in routed.most_common())])


def _kind(matrix: Matrix, device: torch.device) -> str:
    if isinstance(matrix, ScaledMatrix):
        name = _KINDS["fp8" if matrix.values.dtype == FP8 else "int8"]
        if not rounds_inputs(matrix.values.dtype, device):
            off = name != "FP8" or has_fp8(device)
            return f"{name}, inputs not rounded: {f'{INPUT_ROUNDING}=off' if off else 'this card has no FP8'}"
        scales = "squares of 128" if matrix.squares else "a scale for each output"
        return f"{name} and inputs too, {scales}{'' if matrix.static is None else ', inputs by a fixed one'}"
    if isinstance(matrix, PackedMatrix):
        return _codes(matrix)
    return str(matrix.dtype).removeprefix("torch.") if isinstance(matrix, torch.Tensor) else "blocks"


def _of_experts(experts: ExpertWeights | None) -> Iterator[str]:
    """Yield the kind of each matrix of a layer's routed experts, as the GPU step stacks them."""
    if experts is None:
        return
    for own in (list(zip(experts.gates, experts.ups, strict=True)), [(down,) for down in experts.downs]):
        reason, first = lacks(own), own[0][0]
        if reason is None:
            kind = _codes(as_codes(first))
        elif isinstance(first, torch.Tensor):
            kind = _kind(first, first.device)
        else:
            kind = f"bfloat16: {reason} are not kept"
        yield from [kind] * sum(map(len, own))


def _codes(matrix: PackedMatrix) -> str:
    groups = f"groups of {matrix.group}" if matrix.group < matrix.columns else "a scale for each output"
    return f"{_KINDS[matrix.code]}, {groups}{', reordered' if matrix.order is not None else ''}"


def _matrices(weights: Weights) -> Iterator[Matrix]:
    """Yield the matrices that the GPU step multiplies but those of routed experts."""
    for layer in weights.layers:
        found = [layer.q, layer.k, layer.v, layer.o, layer.gate, layer.up, layer.down]
        if (experts := layer.experts) is not None:
            found += [experts.shared_gate, experts.shared_up, experts.shared_down]
        yield from (matrix for matrix in found if matrix is not None)
    yield weights.output_matrix()
