"""Buffers of a step between the residual and the logits, and the rotary tables, on the device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from diptych.engine.backends.triton.recurrent.mixer_room import MixerRoom, room_bytes
from diptych.engine.backends.triton.recurrent.mixers import room_numbers
from diptych.engine.models.rope import cos_sin
from diptych.engine.models.shape import ModelShape

_FIRST_POSITIONS = 2048
Angles = tuple[torch.Tensor, torch.Tensor]
"""float32 cosines and sines `[T, D / 2]`."""


@dataclass(frozen=True)
class ExpertBuffers:
    """Buffers of layers with experts: P pairs of a token and one of its experts."""

    routed: Any
    """Room for the choices (`Operators.make_routed`)."""
    inner: torch.Tensor
    """`[P, expert's intermediate]`."""
    parts: torch.Tensor
    """`[P, H]`."""
    switch: torch.Tensor
    """float32 `[T, 1]`: the shared expert's."""

    def rows(self, tokens: int) -> ExpertBuffers:
        """Return the buffers of `tokens` tokens, as views."""
        pairs = tokens * (len(self.inner) // len(self.switch))
        return ExpertBuffers(
            self.routed.rows(tokens), self.inner[:pairs], self.parts[:pairs], self.switch[:tokens]
        )


@dataclass(frozen=True)
class Activations:
    """Buffers between the residual and the logits for T tokens, made once and reused.

    A decode graph replays on the same addresses, and a decode step, which allocates nothing, cannot run out
    of memory after the KV pool has taken what was free. N heads, K KV heads, D head_dim, H hidden, I
    intermediate.
    """

    residual: torch.Tensor
    """`[T, H]`."""
    normed: torch.Tensor
    """`[T, H]`."""
    qkv: torch.Tensor
    """`[T, (N + 2 K) D]`."""
    queries: torch.Tensor
    """`[T, N, D]`."""
    mixed: torch.Tensor
    """`[T, N, D]`."""
    gate_up: torch.Tensor
    """`[T, 2 I]`, I the larger one of dense layers' and the shared expert's."""
    inner: torch.Tensor
    """`[T, I]`."""
    added: torch.Tensor
    """`[T, H]`: what a half of a layer adds to the residual."""
    angles: tuple[Angles, ...]
    """Angles of each of the model's rotations."""
    experts: ExpertBuffers | None
    mixer: MixerRoom | None
    """Room of recurrent layers."""
    beside: torch.Tensor | None
    """`[T, H]`: what the recurrence adds of a layer that attends, too."""
    q_gate: torch.Tensor | None
    """`[T, N D]`: gates of what attention mixes."""

    @classmethod
    def make(
        cls,
        shape: ModelShape,
        tokens: int,
        dtype: torch.dtype,
        device: torch.device,
        make_routed: Callable[..., Any],
    ) -> Activations:
        """Allocate buffers for up to `tokens` tokens."""
        heads, kv_heads, width = shape.num_heads, shape.num_kv_heads, shape.head_dim
        inner, numbers = _widest_feed_forward(shape), room_numbers(shape)

        def empty(*sizes: int, kind: torch.dtype = dtype) -> torch.Tensor:
            return torch.empty((tokens, *sizes), dtype=kind, device=device)

        def half() -> torch.Tensor:
            return empty(width // 2, kind=torch.float32)

        return cls(
            residual=empty(shape.hidden_size),
            normed=empty(shape.hidden_size),
            qkv=empty((heads + 2 * kv_heads) * width),
            queries=empty(heads, width),
            mixed=empty(heads, width),
            gate_up=empty(2 * inner),
            inner=empty(inner),
            added=empty(shape.hidden_size),
            angles=tuple((half(), half()) for _ in shape.rotations),
            experts=_expert_buffers(shape, tokens, dtype, device, make_routed),
            mixer=None if numbers is None else MixerRoom.make(numbers, tokens, dtype, device),
            beside=empty(shape.hidden_size) if _mixes_twice(shape) else None,
            q_gate=empty(heads * width) if shape.attention_gate else None,
        )

    @property
    def capacity(self) -> int:
        """Tokens that fit."""
        return len(self.residual)

    def feed_forward(self, width: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return room for gates and ups, and for what they become, of a feed-forward of `width`: `[T, 2 *
        width]` and `[T, width]`.
        """
        tokens = self.capacity
        gate_up, inner = self.gate_up.flatten(), self.inner.flatten()
        return gate_up[: tokens * 2 * width].view(tokens, -1), inner[: tokens * width].view(tokens, width)

    def clear_mixed(self) -> None:
        """Make zeros of what attention and recurrences give."""
        self.mixed.zero_()
        if self.mixer is not None:
            self.mixer.clear()

    def rows(self, tokens: int) -> Activations:
        """Return the buffers of `tokens` tokens, as views."""
        plain = {name: value for name, value in vars(self).items() if isinstance(value, torch.Tensor)}
        return replace(
            self,
            **{name: buffer[:tokens] for name, buffer in plain.items()},
            angles=tuple((cos[:tokens], sin[:tokens]) for cos, sin in self.angles),
            experts=None if self.experts is None else self.experts.rows(tokens),
            mixer=None if self.mixer is None else self.mixer.rows(tokens),
        )


def activation_bytes(shape: ModelShape, tokens: int, dtype: torch.dtype) -> int:
    """Return the bytes of the buffers of so many tokens, to a few a token."""
    attention = (2 * shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim
    numbers = 3 * shape.hidden_size + attention + shape.num_heads * shape.head_dim
    numbers += 3 * _widest_feed_forward(shape)
    if (experts := shape.experts) is not None:
        numbers += experts.experts_per_token * (experts.intermediate_size + shape.hidden_size)
    if _mixes_twice(shape):
        numbers += shape.hidden_size
    if shape.attention_gate:
        numbers += shape.num_heads * shape.head_dim
    angles = len(shape.rotations) * shape.head_dim * torch.float32.itemsize
    mixer = room_numbers(shape)
    room = 0 if mixer is None else room_bytes(mixer, tokens, dtype)
    return tokens * (numbers * dtype.itemsize + angles) + room


def _mixes_twice(shape: ModelShape) -> bool:
    """Return whether a layer attends and is recurrent."""
    return any(layer.attention and layer.recurrent is not None for layer in shape.layers)


def _widest_feed_forward(shape: ModelShape) -> int:
    """Return the width of the widest feed-forward that all rows of a step pass."""
    shared = 0 if shape.experts is None else shape.experts.shared_size
    dense = any(not layer.experts for layer in shape.layers)
    return max(shape.intermediate_size if dense else 0, shared)


def _expert_buffers(
    shape: ModelShape,
    tokens: int,
    dtype: torch.dtype,
    device: torch.device,
    make_routed: Callable[..., Any],
) -> ExpertBuffers | None:
    experts = shape.experts
    if experts is None:
        return None
    pairs = tokens * experts.experts_per_token
    return ExpertBuffers(
        routed=make_routed(tokens, experts.num_experts, experts.experts_per_token, device),
        inner=torch.empty((pairs, experts.intermediate_size), dtype=dtype, device=device),
        parts=torch.empty((pairs, shape.hidden_size), dtype=dtype, device=device),
        switch=torch.empty((tokens, 1), dtype=torch.float32, device=device),
    )


class RotaryTables:
    """Rotary angles of all positions on the device, a table a rotation of the model.

    They are float32 cosines and sines `[positions, head_dim / 2]`, the magnitude included.

    Float32 also where the model is bfloat16, as in the native step: a rounded cosine has three digits.
    """

    def __init__(self, shape: ModelShape, device: torch.device) -> None:
        self._shape, self._device = shape, device
        self._earlier: list[list[Angles]] = []
        self._tables: list[Angles] = []
        self._positions = 0
        self._make(min(_FIRST_POSITIONS, shape.max_context))

    def reach(self, positions: int) -> None:
        """Make angles for at least `positions`; they double, so that they are seldom made.

        Earlier tables stay where they are: a captured step reads the one that it was captured with.
        """
        if positions > self._positions:
            self._earlier.append(self._tables)
            self._make(max(positions, 2 * self._positions))

    def gather(self, positions: torch.Tensor, out: tuple[Angles, ...]) -> None:
        """Write the angles at int64 `positions`, `[T]` or `[3, T]`, into `out`."""
        if positions.dim() > 1:
            for number, (cos_out, sin_out) in enumerate(out):
                cos, sin = cos_sin(self._shape, number, positions)
                cos_out.copy_(cos)
                sin_out.copy_(sin)
            return
        for (cos, sin), (cos_out, sin_out) in zip(self._tables, out, strict=True):
            torch.index_select(cos, 0, positions, out=cos_out)
            torch.index_select(sin, 0, positions, out=sin_out)

    def _make(self, positions: int) -> None:
        at = torch.arange(positions, device=self._device)
        self._tables = [cos_sin(self._shape, number, at) for number in range(len(self._shape.rotations))]
        self._positions = positions
