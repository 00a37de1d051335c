"""What a step's layers write between the residual and the logits: buffers that are made once and reused.

A decode graph replays on the same addresses, and a decode step, which allocates nothing, cannot run out of
memory after the KV pool has taken what was free.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from diptych.engine.models.shape import ModelShape


@dataclass(frozen=True)
class Activations:
    """Buffers for T tokens; N heads, K KV heads, D head_dim, H hidden, I intermediate."""

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
    """`[T, 2 I]`."""
    inner: torch.Tensor
    """`[T, I]`."""
    added: torch.Tensor
    """`[T, H]`: what a half of a layer adds to the residual."""
    cos: torch.Tensor
    """float32 `[T, D / 2]`."""
    sin: torch.Tensor

    @classmethod
    def make(cls, shape: ModelShape, tokens: int, dtype: torch.dtype, device: torch.device) -> Activations:
        """Buffers for up to `tokens` tokens."""
        heads, kv_heads, width = shape.num_heads, shape.num_kv_heads, shape.head_dim

        def empty(*sizes: int, kind: torch.dtype = dtype) -> torch.Tensor:
            return torch.empty((tokens, *sizes), dtype=kind, device=device)

        return cls(
            residual=empty(shape.hidden_size),
            normed=empty(shape.hidden_size),
            qkv=empty((heads + 2 * kv_heads) * width),
            queries=empty(heads, width),
            mixed=empty(heads, width),
            gate_up=empty(2 * shape.intermediate_size),
            inner=empty(shape.intermediate_size),
            added=empty(shape.hidden_size),
            cos=empty(width // 2, kind=torch.float32),
            sin=empty(width // 2, kind=torch.float32),
        )

    @property
    def capacity(self) -> int:
        """Tokens that fit."""
        return len(self.residual)

    def rows(self, tokens: int) -> Activations:
        """The same buffers for fewer tokens: views."""
        return Activations(**{name: buffer[:tokens] for name, buffer in vars(self).items()})
