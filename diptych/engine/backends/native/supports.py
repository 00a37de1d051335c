"""Shapes that the native step computes; the others are computed in torch."""

from __future__ import annotations

from collections.abc import Iterator

from diptych.engine.models.shape import ModelShape


def supports(shape: ModelShape) -> str | None:
    """Return None if the native step computes models of `shape`, or else what it lacks, in words."""
    return next(_lacks(shape), None)


def _lacks(shape: ModelShape) -> Iterator[str]:
    if shape.latent is not None:
        yield "attention over latents"
    if any(layer.experts for layer in shape.layers):
        yield "experts"
    if any(layer.rotation != 0 for layer in shape.layers):
        yield "layers that are rotated differently"
    if shape.norm != "rms":
        yield "LayerNorm"
    if shape.norms != "before":
        yield f"norms {shape.norms} a sublayer"
    if shape.qk_norm == "width":
        yield "norms over the whole width of queries and keys"
    if shape.qk_norm != "none" and shape.qk_norm_after_rotation:
        yield "norms of queries and keys after their rotation"
    if shape.score_cap is not None or shape.logit_cap is not None:
        yield "capped scores or logits"
    if shape.sinks:
        yield "attention sinks"
    if shape.grows_queries:
        yield "queries that grow with their position"
    if shape.activation != "silu" or not shape.gated:
        yield f"the activation {shape.activation} {'with' if shape.gated else 'without'} a gate"
    if shape.parallel_residual:
        yield "parallel attention and feed-forward"
    if (shape.embedding_scale, shape.residual_scale, shape.logit_scale) != (1.0, 1.0, 1.0):
        yield "scales of embeddings, residual or logits"
