"""The decoder's layers as kernels, in the order of launches; the meaning is backends/torch/decoder.py.

Ten launches a layer, of which four are products: norm (with the residual's addition), qkv, rotary with the
write of keys and values, attention (two: of decode rows splits and their join, of chunks the gathering of
their contexts and the rest), output, norm with addition, gate and up, their activation (in the same launch
where rows are few), down.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from diptych.engine.backends.triton.linear import LinearOperators
from diptych.engine.backends.triton.operators import Operators
from diptych.engine.backends.triton.packed_step import Group, PackedStep
from diptych.engine.backends.triton.packed_weights import PackedLayer, PackedWeights
from diptych.engine.models.rope import cos_sin
from diptych.engine.models.shape import ModelShape

_FIRST_POSITIONS = 2048


def always() -> bool:
    """Return True: the step cannot be aborted."""
    return True


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
        """Allocate buffers for up to `tokens` tokens."""
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
        """Return the buffers of `tokens` tokens, as views."""
        return Activations(**{name: buffer[:tokens] for name, buffer in vars(self).items()})


class RotaryTable:
    """Rotary angles of all positions on the device: float32 cos and sin `[positions, head_dim / 2]`.

    The magnitude is included.

    Float32 also where the model is bfloat16, as in the native step: a rounded cosine has three digits.
    """

    def __init__(self, shape: ModelShape, device: torch.device) -> None:
        self._shape, self._device = shape, device
        self._earlier: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._make(min(_FIRST_POSITIONS, shape.max_context))

    def reach(self, positions: int) -> None:
        """Make angles for at least `positions`; they double, so that they are seldom made.

        Earlier tables stay where they are: a captured step reads the one that it was captured with.
        """
        if positions > len(self.cos):
            self._earlier.append((self.cos, self.sin))
            self._make(max(positions, 2 * len(self.cos)))

    def _make(self, positions: int) -> None:
        self.cos, self.sin = cos_sin(self._shape, 0, torch.arange(positions, device=self._device))


class Layers:
    """Forward pass of one model, from token ids to logits.

    Allocates what `logits` returns, and for the attention of chunks what `packed_step.gathered_bytes` says at
    most; decode steps allocate nothing else.
    """

    def __init__(
        self,
        shape: ModelShape,
        weights: PackedWeights,
        operators: Operators,
        kv_scales: torch.Tensor | None = None,
    ) -> None:
        """Prepare the forward pass; with `kv_scales` (kernels/fp8_cache.py), on the device, the KV cache is
        in FP8.
        """
        self.shape = shape
        self._scales = kv_scales
        self.weights = weights
        self.operators = operators
        self.rotary = RotaryTable(shape, weights.device)
        self._products = LinearOperators(weights, operators)

    def hidden(
        self,
        step: PackedStep,
        buffers: Activations,
        scratch: Any,
        wanted: Callable[[], bool] = always,
    ) -> torch.Tensor | None:
        """Return the last layer's output, normalised: `[T, hidden]`, in `buffers`.

        `buffers` has a row a token. `scratch` holds the decode rows' partial sums. `wanted` is asked before
        every layer; None is returned once it says no. The rotary table must reach the step's positions.
        """
        operators, products = self.operators, self._products
        weights, eps = self.weights, self.shape.rms_eps
        torch.index_select(weights.embed, 0, step.tokens, out=buffers.residual)
        torch.index_select(self.rotary.cos, 0, step.positions, out=buffers.cos)
        torch.index_select(self.rotary.sin, 0, step.positions, out=buffers.sin)
        operators.rms_norm(buffers.residual, weights.layers[0].input_norm, eps, out=buffers.normed)
        following = [*(layer.input_norm for layer in weights.layers[1:]), weights.final_norm]
        for index, (layer, next_norm) in enumerate(zip(weights.layers, following, strict=True)):
            if not wanted():
                return None
            self._attention(index, layer, step, buffers, scratch)
            operators.add_rms_norm(buffers.added, buffers.residual, layer.post_norm, eps, out=buffers.normed)
            products.gated(buffers.normed, layer.gate_up, buffers.gate_up, out=buffers.inner)
            products.linear(buffers.inner, layer.down, out=buffers.added)
            operators.add_rms_norm(buffers.added, buffers.residual, next_norm, eps, out=buffers.normed)
        return buffers.normed

    def logits(self, hidden: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Float32 logits `[rows, vocab]` of rows of `hidden`."""
        if out is None:
            out = torch.empty((len(hidden), self.shape.vocab_size), dtype=torch.float32, device=hidden.device)
        return self._products.head(hidden, out=out)

    def _attention(
        self, index: int, layer: PackedLayer, step: PackedStep, buffers: Activations, scratch: Any
    ) -> None:
        """Attention's half of a layer, into `buffers.added`."""
        self._products.linear(buffers.normed, layer.qkv, out=buffers.qkv)
        for group in step.groups:
            self._write(index, layer, step, group, buffers)
            self._attend(index, group, buffers, scratch)
        self._products.linear(buffers.mixed.view(len(buffers.mixed), -1), layer.output, out=buffers.added)

    def _write(
        self, index: int, layer: PackedLayer, step: PackedStep, group: Group, buffers: Activations
    ) -> None:
        shape, rows = self.shape, group.rows
        heads = shape.num_heads + 2 * shape.num_kv_heads
        self.operators.rotary_write(
            buffers.qkv[rows].view(-1, heads, shape.head_dim),
            buffers.cos[rows],
            buffers.sin[rows],
            group.blocks,
            index,
            step.block_ids[rows],
            step.lanes[rows],
            heads=shape.num_heads,
            kv_heads=shape.num_kv_heads,
            q_norm=layer.q_norm,
            k_norm=layer.k_norm,
            eps=shape.rms_eps,
            scales=self._scales,
            out=buffers.queries[rows],
        )

    def _attend(self, index: int, group: Group, buffers: Activations, scratch: Any) -> None:
        operators, window = self.operators, self.shape.window(index)
        if (decodes := group.decodes) is not None:
            operators.paged_decode(
                buffers.queries[decodes.rows],
                group.blocks,
                index,
                decodes.tables,
                decodes.lengths,
                window=window,
                scales=self._scales,
                scratch=scratch,
                out=buffers.mixed[decodes.rows],
            )
        for chunks in group.chunks:
            operators.paged_prefill(
                buffers.queries[chunks.rows],
                group.blocks,
                index,
                chunks.tables,
                chunks.starts,
                chunks.offsets,
                max_tokens=chunks.max_tokens,
                context_tokens=chunks.context_tokens,
                window=window,
                scales=self._scales,
                out=buffers.mixed[chunks.rows],
            )
