"""Shapes that the native step computes; the others are computed in torch."""

from __future__ import annotations

from collections.abc import Iterator

from diptych.engine.backends.native.recurrent import lacks_recurrences
from diptych.engine.backends.torch_only import torch_only
from diptych.engine.models.shape import ModelShape

_MOST_GROUPS = 64
"""Groups of experts that a router may have (kernels/cpu/expert_routing.h)."""


def supports(shape: ModelShape) -> str | None:
    """Return None if the native step computes models of `shape`, or else what it lacks, in words."""
    return next(_lacks(shape), None)


def supports_in_parts(shape: ModelShape) -> str | None:
    """Return None if ranks compute their parts of models of `shape`, or else what they lack, in words."""
    return "attention with a gate" if shape.attention_gate else supports(shape)


def _lacks(shape: ModelShape) -> Iterator[str]:
    yield from torch_only(shape)
    yield from lacks_recurrences(shape)
    if shape.norm_bias:
        yield "norms with a bias"
    if shape.parallel_residual:
        yield "parallel attention and feed-forward"
    if shape.experts is not None and shape.experts.gated != shape.gated:
        yield "experts with a gate beside a feed-forward without one, or the other way round"
    if shape.experts is not None and shape.experts.groups > _MOST_GROUPS:
        yield f"more than {_MOST_GROUPS} groups of experts"
