"""Features that models of some shapes lack in every backend that computes them."""

from __future__ import annotations

from diptych.engine.backends.torch_only import NO_RECURRENT_ADAPTERS, NO_RECURRENT_TREES
from diptych.engine.models.shape import ModelShape


def lacks_adapters(shape: ModelShape) -> str | None:
    """Return None if adapters of models of `shape` are computed, or else what is lacking, in words."""
    if shape.recurrent_layers:
        return NO_RECURRENT_ADAPTERS
    return "adapters of attention over latents" if shape.latent is not None else None


def lacks_trees(shape: ModelShape) -> str | None:
    """Return None if trees of tokens are computed for models of `shape`, else what is lacking, in words."""
    if shape.recurrent_layers:
        return NO_RECURRENT_TREES
    return "attention over latents knows no trees of tokens" if shape.latent is not None else None
