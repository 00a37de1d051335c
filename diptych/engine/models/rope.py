"""Rotary embedding: angles of each pair of lanes, with the scalings of long-context models.

Pairs are halves of a head: lane i with lane i + head_dim / 2. Files that pair otherwise, or rotate a part of
each head, have their rows reordered (`lane_order`), and pairs that are not rotated have frequency 0.
"""

from __future__ import annotations

import math

import torch

from diptych.engine.models.shape import ModelShape, RopeScaling, Rotation


def inverse_frequencies(shape: ModelShape, rotation: int = 0) -> torch.Tensor:
    """Angle per position of each pair of lanes: float32 `[head_dim / 2]`, scaling included.

    `rotation` is an index into `ModelShape.rotations`.
    """
    chosen = shape.rotations[rotation]
    rotated = _rotated_frequencies(chosen, shape.max_context)
    return torch.nn.functional.pad(rotated, (0, shape.head_dim // 2 - len(rotated)))


def rotary_magnitudes(shape: ModelShape, rotation: int = 0) -> torch.Tensor:
    """Return the factors of cos and sin, float32 `[head_dim / 2]`: 1 but for yarn and longrope, which sharpen
    the attention of long contexts.
    """
    chosen = shape.rotations[rotation]
    magnitudes = torch.ones(shape.head_dim // 2)
    magnitudes[: chosen.width // 2] = _magnitude(chosen.scaling)
    return magnitudes


def cos_sin(
    shape: ModelShape, rotation: int | None, positions: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cos and sin of the angles at `positions [n]`, float32 `[n, head_dim / 2]` each, magnitude
    included, on the device of `positions`. `rotation` None gives ones and zeros: nothing is rotated.

    Tokens may have three positions, `[3, n]`: each pair of lanes turns by that of its axis.
    """
    if rotation is None:
        ones = torch.ones((positions.shape[-1], shape.head_dim // 2), device=positions.device)
        return ones, torch.zeros_like(ones)
    frequencies = inverse_frequencies(shape, rotation).float().to(positions.device)
    magnitudes = rotary_magnitudes(shape, rotation).to(positions.device)
    if positions.dim() > 1:
        axes = torch.tensor(shape.rotations[rotation].axes, device=positions.device)
        axes = torch.nn.functional.pad(axes, (0, shape.head_dim // 2 - len(axes)))  # the rest is not rotated
        angles = positions[axes].T.float() * frequencies
    else:
        angles = positions.float().unsqueeze(1) * frequencies
    return angles.cos() * magnitudes, angles.sin() * magnitudes


def lane_order(head_dim: int, width: int, *, interleaved: bool) -> list[int] | None:
    """Return for each lane of a head the file's lane that belongs there; None if that is each its own.

    `width` lanes of the file's are rotated, the first ones, `interleaved` says as pairs of neighbours.
    """
    if width == head_dim and not interleaved:
        return None
    pairs = width // 2
    firsts = range(0, width, 2) if interleaved else range(pairs)
    seconds = range(1, width, 2) if interleaved else range(pairs, width)
    middle = width + (head_dim - width) // 2
    return [*firsts, *range(width, middle), *seconds, *range(middle, head_dim)]


def yarn_magnitude(factor: float, sharpness: float = 1.0) -> float:
    """Return the magnitude that yarn's paper takes for contexts `factor` times as long."""
    return 0.1 * sharpness * math.log(factor) + 1.0 if factor > 1.0 else 1.0


def _magnitude(scaling: RopeScaling | None) -> float:
    if scaling is None or scaling.kind not in ("yarn", "longrope"):
        return 1.0
    if scaling.attention_factor is not None:
        return scaling.attention_factor
    return yarn_magnitude(scaling.factor) if scaling.kind == "yarn" else 1.0


def _rotated_frequencies(rotation: Rotation, max_context: int) -> torch.Tensor:
    """`[width / 2]`."""
    exponents = torch.arange(0, rotation.width, 2, dtype=torch.int64).float() / rotation.width
    stretched = rotation.theta**exponents
    scaling = rotation.scaling
    if scaling is not None and scaling.kind == "longrope":
        beyond = max_context > scaling.original_context
        factors = scaling.long_factors if beyond else scaling.factors
        return 1.0 / (torch.tensor(factors, dtype=torch.float32) * stretched)
    plain = 1.0 / stretched
    if scaling is None:
        return plain
    if scaling.kind == "linear":
        return plain / scaling.factor
    if scaling.kind == "factors":
        return plain / torch.tensor(scaling.factors, dtype=torch.float32)
    if scaling.kind == "llama3":
        return _llama3(plain, scaling)
    return _yarn(plain, scaling, rotation)


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


def _yarn(plain: torch.Tensor, scaling: RopeScaling, rotation: Rotation) -> torch.Tensor:
    def dimension_of(rotations: float) -> float:
        """Return the pair that turns `rotations` times within the trained context."""
        turns = scaling.original_context / (rotations * 2 * math.pi)
        return rotation.width * math.log(turns) / (2 * math.log(rotation.theta))

    low, high = dimension_of(scaling.beta_fast), dimension_of(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rotation.width - 1)
    if low == high:
        high += 0.001  # the ramp of the paper divides by their difference
    ramp = ((torch.arange(plain.numel(), dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    return plain / scaling.factor * ramp + plain * (1 - ramp)
