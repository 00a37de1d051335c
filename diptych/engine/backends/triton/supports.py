"""Shapes that the Triton step computes; the others are computed in torch."""

from __future__ import annotations

from collections.abc import Iterator

from diptych.engine.backends.torch_only import torch_only
from diptych.engine.backends.triton.recurrent.mixers import MIXERS
from diptych.engine.models.shape import ModelShape

_GATES = frozenset({"silu", "gelu", "gelu_tanh", "clamped_swiglu"})
"""Activations of gates: those of kernels/gpu/swiglu.py."""
_PLAIN = frozenset({"relu2", "silu"})
"""Activations of feed-forwards without a gate."""


def supports(shape: ModelShape) -> str | None:
    """Return None if the Triton step computes models of `shape`, or else what it lacks, in words."""
    return next(_lacks(shape), None)


def _lacks(shape: ModelShape) -> Iterator[str]:
    for layer in shape.layers:
        if layer.recurrent is not None and type(layer.recurrent) not in MIXERS:
            yield f"recurrent layers of {layer.recurrent.kind}"
    if shape.experts is not None and not shape.experts.gated:
        yield "experts without a gate"
    if shape.attention_gate and not shape.recurrent_layers:
        yield "attention with a gate"  # a model without recurrent layers may be dealt to parts
    yield from torch_only(shape)
    # Without a gate: of models with recurrent layers alone, which have neither adapters nor parts.
    plain = not shape.gated and shape.activation in _PLAIN and bool(shape.recurrent_layers)
    if not plain and (not shape.gated or shape.activation not in _GATES):
        yield f"the activation {shape.activation} {'with' if shape.gated else 'without'} a gate"
    if shape.parallel_residual:
        yield "parallel attention and feed-forward"
