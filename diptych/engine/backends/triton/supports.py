"""Shapes that the Triton step computes; the others are computed in torch."""

from __future__ import annotations

from collections.abc import Iterator

from diptych.engine.backends.torch_only import torch_only
from diptych.engine.backends.triton.recurrent.mixers import MIXERS
from diptych.engine.models.shape import ModelShape

_GATES = frozenset({"silu", "gelu", "gelu_tanh", "clamped_swiglu"})
"""Activations of gates: those of kernels/gpu/swiglu.py."""


def supports(shape: ModelShape) -> str | None:
    """Return None if the Triton step computes models of `shape`, or else what it lacks, in words."""
    return next(_lacks(shape), None)


def _lacks(shape: ModelShape) -> Iterator[str]:
    for layer in shape.layers:
        if layer.recurrent is not None and type(layer.recurrent) not in MIXERS:
            yield f"recurrent layers of {layer.recurrent.kind}"
    yield from torch_only(shape)
    if not shape.gated or shape.activation not in _GATES:
        yield f"the activation {shape.activation} {'with' if shape.gated else 'without'} a gate"
    if shape.parallel_residual:
        yield "parallel attention and feed-forward"
