"""Features that the torch step alone computes, and what no step computes of recurrent layers."""

from __future__ import annotations

from collections.abc import Iterator

from diptych.engine.models.shape import ModelShape

NO_RECURRENT_ADAPTERS = "adapters of recurrent layers"
NO_RECURRENT_TREES = "a recurrent layer knows no trees of tokens"


def torch_only(shape: ModelShape) -> Iterator[str]:
    """Yield what of a model of `shape` neither the native nor the Triton step computes, in words."""
    if shape.latent is not None:
        yield "attention over latents"
    if shape.norm != "rms":
        yield "LayerNorm"
