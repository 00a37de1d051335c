"""Work of a step at least: bytes it reads and operations it computes, counted from the model's shape.

With a machine's ceilings they give the roofline (Williams, Waterman and Patterson 2009): no step can be
faster than its bytes take to be read, nor than its operations take to be computed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from diptych.engine.models.shape import ModelShape
from lab.roofline.ceilings import Ceilings, Format

FORMAT_OF: Mapping[str, Format] = {"fp32": "fp32", "bf16": "bf16", "int8": "int8", "gguf": "int8"}
"""Number format in which a precision multiplies weights; keys and values are multiplied in fp32 or bf16."""

BITS_A_WEIGHT: Mapping[str, float] = {"fp32": 32, "bf16": 16, "int8": 8}
"""Group scales are left out: the floor is what no implementation can do without."""


@dataclass(frozen=True)
class Work:
    """Work of one step, or of a whole prefill."""

    read_bytes: float
    """Weights once a step, and the keys and values that are attended to."""
    products: float
    """Operations with weights, a multiplication and an addition being two."""
    attention: float
    """Operations with keys and values."""


@dataclass(frozen=True)
class Roof:
    """The shortest time that the machine allows, and what it is bound by."""

    seconds: float
    bound: Literal["memory", "arithmetic"]


@dataclass(frozen=True)
class WeightSize:
    """Parameters of the matrices that every step reads, and the bytes that they lie in."""

    layers: int
    head: int
    nbytes: float
    closing: int
    """Part of the last layer that only tokens with logits need: all but the matrices of keys and values."""


def weight_size(shape: ModelShape, precision: str, file_bytes: int | None = None) -> WeightSize:
    """`file_bytes` are those of the matrices in a file whose own blocks are computed with (`gguf`).

    Raises KeyError for a precision that is neither known nor given in bytes.
    """
    heads, kv = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    closing = shape.hidden_size * (2 * heads + 3 * shape.intermediate_size)
    layers = shape.num_layers * (closing + shape.hidden_size * 2 * kv)
    head = shape.vocab_size * shape.hidden_size
    known = file_bytes if file_bytes is not None else (layers + head) * BITS_A_WEIGHT[precision] / 8
    return WeightSize(layers, head, known, closing)


def decode_work(shape: ModelShape, weights: WeightSize, kv_itemsize: int, batch: int, context: int) -> Work:
    """Count one token for each of `batch` sequences, each attending to `context` tokens, itself included."""
    return Work(
        read_bytes=weights.nbytes + batch * context * _kv_elements(shape) * kv_itemsize,
        products=2.0 * batch * (weights.layers + weights.head),
        attention=_attention(shape, batch * context, shape.num_layers),
    )


def prefill_work(shape: ModelShape, weights: WeightSize, kv_itemsize: int, tokens: int, chunk: int) -> Work:
    """Count a prompt of `tokens`, in chunks.

    Only the last token goes through the head, and through the last layer beyond its keys and values.
    """
    steps = -(-tokens // chunk)
    ends = [min(tokens, (step + 1) * chunk) for step in range(steps)]
    return Work(
        read_bytes=steps * weights.nbytes + sum(ends) * _kv_elements(shape) * kv_itemsize,
        products=2.0 * (tokens * weights.layers - (tokens - 1) * weights.closing + weights.head),
        attention=_attention(shape, tokens * (tokens + 1) // 2, shape.num_layers - 1)
        + _attention(shape, tokens, 1),
    )


def roof(work: Work, ceilings: Ceilings, precision: str, kv_itemsize: int) -> Roof:
    """Return the larger of both times: reading and computing may overlap wholly."""
    reading = work.read_bytes / ceilings.read_rate
    for_kv = ceilings.peaks["fp32"].rate
    if kv_itemsize == 2:  # bf16 may be widened: where the CPU does not multiply it, that is faster
        for_kv = max(for_kv, ceilings.peaks["bf16"].rate)
    computing = work.products / ceilings.peaks[FORMAT_OF[precision]].rate + work.attention / for_kv
    return Roof(reading, "memory") if reading >= computing else Roof(computing, "arithmetic")


def _kv_elements(shape: ModelShape) -> int:
    """Count the numbers of one token in all layers."""
    return 2 * shape.num_layers * shape.num_kv_heads * shape.head_dim


def _attention(shape: ModelShape, pairs: int, layers: int) -> float:
    """`pairs` of a query and a token that it sees: a product with its key and one with its value."""
    return 4.0 * pairs * layers * shape.num_heads * shape.head_dim
