"""Buffers of a step of a rank that computes several parts: one residual stream, and the rest by part."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from diptych.engine.backends.triton.activations import Activations, Angles, activation_bytes
from diptych.engine.models.shape import ModelShape


@dataclass(frozen=True)
class PartsActivations:
    """Buffers for T tokens; P parts are this rank's, H hidden."""

    own: tuple[Activations, ...]
    """Buffers of each part, with one stream and one set of angles for all; `added` are rows of `outputs`."""
    outputs: torch.Tensor
    """`[P, T, H]`: what the parts add to the residual, side by side as they are sent."""
    added: torch.Tensor
    """`[T, H]`: the sum of all ranks' parts."""

    @classmethod
    def make(
        cls,
        shapes: Sequence[ModelShape],
        tokens: int,
        dtype: torch.dtype,
        device: torch.device,
        make_routed: Callable[..., Any],
    ) -> PartsActivations:
        """Allocate buffers for up to `tokens` tokens of parts of these `shapes`."""
        lead = Activations.make(shapes[0], tokens, dtype, device, make_routed)
        outputs = lead.added.new_empty(len(shapes), tokens, lead.added.shape[1])
        own = [lead]
        for shape in shapes[1:]:
            # One after the other: there is no room for a stream of each.
            own.append(_in_stream(Activations.make(shape, tokens, dtype, device, make_routed), lead))
        return cls(_beside(own, outputs), outputs, lead.added)

    @property
    def residual(self) -> torch.Tensor:
        """`[T, H]`."""
        return self.own[0].residual

    @property
    def normed(self) -> torch.Tensor:
        """`[T, H]`."""
        return self.own[0].normed

    @property
    def angles(self) -> tuple[Angles, ...]:
        """Angles of each of the model's rotations."""
        return self.own[0].angles

    @property
    def capacity(self) -> int:
        """Tokens that fit."""
        return len(self.residual)

    def clear_mixed(self) -> None:
        """Make zeros of what attention gives."""
        for one in self.own:
            one.clear_mixed()

    def rows(self, tokens: int) -> PartsActivations:
        """Return the buffers of `tokens` tokens, as views; the outputs of fewer tokens lie closer."""
        parts, width = len(self.own), self.outputs.shape[2]
        outputs = self.outputs.view(-1)[: parts * tokens * width].view(parts, tokens, width)
        own = [one.rows(tokens) for one in self.own]
        return PartsActivations(_beside(own, outputs), outputs, self.added[:tokens])


def parts_activation_bytes(
    shapes: Sequence[ModelShape], parts: int, tokens: int, dtype: torch.dtype, *, sends_rows: bool = False
) -> int:
    """Return the bytes of the buffers of so many tokens, and of the exchanges between them, to a few a token.

    Args:
        shapes: those of this rank's parts.
        parts: number of all ranks' parts, whose outputs a rank gathers unless all are its own.
        sends_rows: whether rows are sent to their experts, and their outputs back.
    """
    hidden = shapes[0].hidden_size
    streams = activation_bytes(shapes[0], tokens, dtype) + sum(
        activation_bytes(shape, tokens, dtype) - _stream_bytes(shape, tokens, dtype) for shape in shapes[1:]
    )
    rows = len(shapes) + (parts if len(shapes) < parts else 0)
    if sends_rows and (experts := shapes[0].experts) is not None:
        rows += 1 + 2 * experts.experts_per_token
    return streams + rows * tokens * hidden * dtype.itemsize


def _stream_bytes(shape: ModelShape, tokens: int, dtype: torch.dtype) -> int:
    """Return the bytes of what the parts of a rank have once: the streams, and the angles."""
    angles = len(shape.rotations) * shape.head_dim * torch.float32.itemsize
    return tokens * (3 * shape.hidden_size * dtype.itemsize + angles)


def _in_stream(own: Activations, lead: Activations) -> Activations:
    """Return buffers of a part with the residual stream and the angles of the first, and no `added` of its
    own.
    """
    return replace(own, residual=lead.residual, normed=lead.normed, angles=lead.angles, added=lead.added)


def _beside(own: Sequence[Activations], outputs: torch.Tensor) -> tuple[Activations, ...]:
    """Return buffers of parts with the rows of `outputs [P, T, H]` for what they add."""
    return tuple(replace(one, added=added) for one, added in zip(own, outputs, strict=True))
