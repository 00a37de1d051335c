"""The decoder's layers as kernels: the meaning is engine/decoder.py's, the order of launches is here.

Eleven launches a layer, of which four are library products: norm (with the residual's addition), qkv,
rotary with the write of keys and values, attention (two launches where it is split over the context), output,
norm with addition, gate and up, their activation, down.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from engine.gpu.activations import Activations
from engine.gpu.operators import Operators
from engine.gpu.packed_step import Group, PackedStep
from engine.gpu.packed_weights import PackedLayer, PackedWeights
from engine.gpu.rotary_table import RotaryTable
from engine.shape import ModelShape


def always() -> bool:
    """A step that nobody can abort."""
    return True


class Layers:
    """One model's forward pass, from token ids to logits; allocates only what `logits` returns."""

    def __init__(
        self,
        shape: ModelShape,
        weights: PackedWeights,
        operators: Operators,
        kv_scales: torch.Tensor | None = None,
    ) -> None:
        """With `kv_scales` (kernels/fp8_cache.py), on the device, keys and values are kept in FP8."""
        self.shape = shape
        self._scales = kv_scales
        self.weights = weights
        self.operators = operators
        self.rotary = RotaryTable(shape, weights.device)
        self._head = choose_head_product(weights)

    def hidden(
        self,
        step: PackedStep,
        buffers: Activations,
        scratch: Any,
        wanted: Callable[[], bool] = always,
    ) -> torch.Tensor | None:
        """The last layer's output, normalised: `[T, hidden]`, in `buffers`.

        `buffers` has a row a token. `scratch` holds the decode rows' partial sums. `wanted` is asked before
        every layer; None is returned once it says no. The rotary table must reach the step's positions.
        """
        operators, weights, eps = self.operators, self.weights, self.shape.rms_eps
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
            layer.gate_up(buffers.normed, buffers.gate_up)
            operators.swiglu(buffers.gate_up, out=buffers.inner)
            layer.down(buffers.inner, buffers.added)
            operators.add_rms_norm(buffers.added, buffers.residual, next_norm, eps, out=buffers.normed)
        return buffers.normed

    def logits(self, hidden: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Float32 logits `[rows, vocab]` of rows of `hidden`."""
        if out is None:
            out = torch.empty((len(hidden), self.shape.vocab_size), dtype=torch.float32, device=hidden.device)
        return self._head(hidden, self.weights.head, out)

    def _attention(
        self, index: int, layer: PackedLayer, step: PackedStep, buffers: Activations, scratch: Any
    ) -> None:
        """Attention's half of a layer, into `buffers.added`."""
        layer.qkv(buffers.normed, buffers.qkv)
        for group in step.groups:
            self._write(index, layer, step, group, buffers)
            self._attend(index, group, buffers, scratch)
        layer.output(buffers.mixed.view(len(buffers.mixed), -1), buffers.added)

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
        if (chunks := group.chunks) is not None:
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


HeadProduct = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def choose_head_product(weights: PackedWeights) -> HeadProduct:
    """How the last product comes to float32: within the product where torch can, else rounded and widened.

    Logits of 20 in bfloat16 lie an eighth apart: whole groups of tokens would be equally likely.
    """
    if weights.dtype == torch.float32:
        return _plain
    row = torch.zeros((1, weights.head.shape[0]), dtype=weights.dtype, device=weights.device)
    out = torch.empty((1, weights.head.shape[1]), dtype=torch.float32, device=weights.device)
    try:
        _wide(row, weights.head, out)
    except (RuntimeError, TypeError):  # CPUs, and versions of torch without it
        return _widened
    return _wide


def _plain(hidden: torch.Tensor, head: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    return torch.mm(hidden, head, out=out)


def _wide(hidden: torch.Tensor, head: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    return torch.mm(hidden, head, out_dtype=torch.float32, out=out)


def _widened(hidden: torch.Tensor, head: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    return out.copy_(torch.mm(hidden, head))
