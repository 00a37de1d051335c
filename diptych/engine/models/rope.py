"""Rotary embedding: inverse frequencies and magnitude, with the scalings of long-context models."""

from __future__ import annotations

import math

import torch

from diptych.engine.models.shape import ModelShape, RopeScaling


def inverse_frequencies(shape: ModelShape) -> torch.Tensor:
    """Angle per position of each pair of lanes: float32 `[head_dim / 2]`, scaling included."""
    exponents = torch.arange(0, shape.head_dim, 2, dtype=torch.int64).float() / shape.head_dim
    plain = 1.0 / (shape.rope_theta**exponents)
    scaling = shape.rope_scaling
    if scaling is None:
        return plain
    if scaling.kind == "linear":
        return plain / scaling.factor
    if scaling.kind == "factors":
        return plain / torch.tensor(scaling.factors, dtype=torch.float32)
    if scaling.kind == "llama3":
        return _llama3(plain, scaling)
    return _yarn(plain, scaling, shape)


def rotary_magnitude(shape: ModelShape) -> float:
    """Return the factor of cos and sin: 1 for all but yarn, which sharpens the attention of long contexts."""
    scaling = shape.rope_scaling
    if scaling is None or scaling.kind != "yarn":
        return 1.0
    if scaling.attention_factor is not None:
        return scaling.attention_factor
    return yarn_magnitude(scaling.factor)


def yarn_magnitude(factor: float) -> float:
    """Return the magnitude that yarn's paper takes for contexts `factor` times as long."""
    return 0.1 * math.log(factor) + 1.0 if factor > 1.0 else 1.0


def _llama3(plain: torch.Tensor, scaling: RopeScaling) -> torch.Tensor:
    wavelengths = 2 * math.pi / plain
    longest = scaling.original_context / scaling.low_freq_factor
    shortest = scaling.original_context / scaling.high_freq_factor
    stretched = torch.where(wavelengths > longest, plain / scaling.factor, plain)
    share = (scaling.original_context / wavelengths - scaling.low_freq_factor) / (
        scaling.high_freq_factor - scaling.low_freq_factor
    )
    blended = (1 - share) * stretched / scaling.factor + share * stretched
    between = (wavelengths >= shortest) & (wavelengths <= longest)
    return torch.where(between, blended, stretched)


def _yarn(plain: torch.Tensor, scaling: RopeScaling, shape: ModelShape) -> torch.Tensor:
    def dimension_of(rotations: float) -> float:
        """Return the pair that turns `rotations` times within the trained context."""
        turns = scaling.original_context / (rotations * 2 * math.pi)
        return shape.head_dim * math.log(turns) / (2 * math.log(shape.rope_theta))

    low, high = dimension_of(scaling.beta_fast), dimension_of(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, shape.head_dim - 1)
    if low == high:
        high += 0.001  # the ramp of the paper divides by their difference
    ramp = ((torch.arange(plain.numel(), dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    return plain / scaling.factor * ramp + plain * (1 - ramp)
