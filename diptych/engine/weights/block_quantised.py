"""Storage of tensors in the quantised precisions: which are kept in blocks, and how others are stored."""

from __future__ import annotations

from collections.abc import Iterable

import gguf
import torch

from diptych.engine.dtype import Precision, plain_dtype
from diptych.engine.weights.canonical import Matrix
from kernels import byte_codes, byte_linear, quantised_linear
from kernels.packed_matrix import from_blocks
from kernels.quantised_linear import BlockFormat, BlockMatrix
from kernels.scaled_matrix import FP8, INT8, quantise

_MATRICES = frozenset({"q_a", "q_b", "k_b", "q", "k", "v", "q_gate", "o", "gate", "up", "down", "head"})
_FUSED = ({"q", "k", "v"}, {"gate", "up"})
_KEPT: dict[gguf.GGMLQuantizationType, BlockFormat] = {
    gguf.GGMLQuantizationType.Q4_0: "q4_0",
    gguf.GGMLQuantizationType.Q4_1: "q4_1",
    gguf.GGMLQuantizationType.Q8_0: "q8_0",
    gguf.GGMLQuantizationType.Q2_K: "q2_k",
    gguf.GGMLQuantizationType.Q3_K: "q3_k",
    gguf.GGMLQuantizationType.Q4_K: "q4_k",
    gguf.GGMLQuantizationType.Q5_K: "q5_k",
    gguf.GGMLQuantizationType.Q6_K: "q6_k",
    gguf.GGMLQuantizationType.IQ4_XS: "iq4_xs",
    gguf.GGMLQuantizationType.IQ4_NL: "iq4_nl",
    gguf.GGMLQuantizationType.MXFP4: "mxfp4",
}
_JOINED_ROWS = 32
"""Columns of a packed block, which has one format (kernels/cpu/blocks.h)."""


def is_matrix(name: str) -> bool:
    """Return whether the tensor of this canonical name is a factor of products (the embedding is not)."""
    last = name.rsplit(".", 1)[-1]
    return last in _MATRICES or last.endswith("_proj")


def multiplied_together(name: str) -> list[str]:
    """Return the canonical names of all matrices that one product joins with `name`, itself included."""
    prefix, _, field = name.rpartition(".")
    for group in _FUSED:
        if field in group:
            return [f"{prefix}.{other}" for other in sorted(group)]
    return [name]


def kept_format(kind: gguf.GGMLQuantizationType) -> BlockFormat | None:
    """Return the format in which a matrix of this type is kept, None if it cannot be."""
    return _KEPT.get(kind)


def kept_together(name: str, kinds: set[gguf.GGMLQuantizationType], rows: Iterable[int]) -> bool:
    """Return whether the matrices that one product joins with `name`, of these types and rows, can be kept.

    llama.cpp gives the values of half the layers more bits than queries and keys. Queries, keys and values
    lie one after another; gate and up take turns, so that they must have one format.
    """
    if any(kind not in _KEPT for kind in kinds):
        return False
    joined = name.rsplit(".", 1)[-1] in _FUSED[0] and all(count % _JOINED_ROWS == 0 for count in rows)
    return len(kinds) == 1 or joined


def blocks_in_precision(blocks: BlockMatrix, precision: Precision) -> Matrix | None:
    """Return blocks of the file as `precision` stores them, None where it makes full numbers of them."""
    if precision == "gguf":
        return blocks
    if precision == "packed":
        return from_blocks(blocks)
    return byte_codes.code_matrix(blocks) if precision == "int8" else None


_FLOAT32 = frozenset({"router", "router_bias", "correction_bias", "shared_router", "sinks"})
ROUNDED: dict[Precision, torch.dtype] = {"fp8": FP8, "w8a8": INT8}
"""Precisions that round matrices of full numbers for a GPU."""


def in_precision(name: str, tensor: torch.Tensor, precision: Precision, *, float32: bool = False) -> Matrix:
    """Return a tensor of full numbers as `precision` stores it, or as `float32`, in memory of its own.

    `tensor` may be the mapped file itself: a model that is written over it must not change one in use.
    """
    if float32 or name.rsplit(".", 1)[-1] in _FLOAT32:
        return tensor.to(torch.float32, copy=True)
    if precision in ROUNDED and is_matrix(name) and name != "head":
        return quantise(tensor, ROUNDED[precision])
    if (plain := plain_dtype(precision)) is not None:
        return tensor.to(plain, copy=True)
    if is_matrix(name):
        if precision == "int8":
            return byte_linear.quantise_matrix(tensor)
        return quantised_linear.quantise_matrix(tensor)
    return tensor.to(torch.bfloat16 if name == "embed" else torch.float32, copy=True)
