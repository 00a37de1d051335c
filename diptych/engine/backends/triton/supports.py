"""Shapes that the Triton step computes; the others are computed in torch."""

from __future__ import annotations

from collections.abc import Iterator

from diptych.engine.backends.torch_only import torch_only
from diptych.engine.models.shape import ModelShape

_GATES = frozenset({"silu", "gelu", "gelu_tanh", "clamped_swiglu"})
"""Activations of gates: those of kernels/gpu/swiglu.py."""


def supports(shape: ModelShape) -> str | None:
    """Return None if the Triton step computes models of `shape`, or else what it lacks, in words."""
    return next(_lacks(shape), None)


def _lacks(shape: ModelShape) -> Iterator[str]:
    if shape.recurrent_layers:
        yield "recurrent layers"
    if not all(layer.attention and layer.feed_forward for layer in shape.layers):
        yield "layers without attention or without a feed-forward"
    yield from torch_only(shape)
    if shape.experts is not None and not shape.experts.gated:
        yield "experts without a gate"
    if shape.attention_gate:
        yield "attention with a gate"
    if not shape.gated or shape.activation not in _GATES:
        yield f"the activation {shape.activation} {'with' if shape.gated else 'without'} a gate"
    if shape.parallel_residual:
        yield "parallel attention and feed-forward"
