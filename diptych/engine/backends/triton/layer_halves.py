"""The two halves of the decoder's layers as kernels: what attention and feed-forward add to the residual.

They know no residual. Layers (layers.py) have one such set; a rank of a group has one for each of its parts,
whose outputs are added up elsewhere (parts_layers.py).
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional

from diptych.engine.backends.triton.activations import Activations
from diptych.engine.backends.triton.adapters import DeviceAdapters, Product
from diptych.engine.backends.triton.batch_invariant import choose_products
from diptych.engine.backends.triton.expert_layers import ExpertLayers
from diptych.engine.backends.triton.operators import Operators
from diptych.engine.backends.triton.packed_step import Group, PackedStep, SeeingRows, TableRows
from diptych.engine.backends.triton.packed_weights import PackedLayer, PackedWeights
from diptych.engine.backends.triton.recurrent.mixer import Mixer
from diptych.engine.backends.triton.recurrent.mixers import mixer_kind
from diptych.engine.backends.triton.rounded_inputs import Rows
from diptych.engine.models.shape import ModelShape
from kernels.paged_attention import paged_attention


class LayerHalves:
    """Halves of the layers of one model, or of one part of it."""

    def __init__(
        self,
        shape: ModelShape,
        weights: PackedWeights,
        operators: Operators,
        kv_scales: torch.Tensor | None = None,
    ) -> None:
        """Prepare the halves; with `kv_scales`, float32 `[layers, 2, kv_heads]` on the device, the KV cache
        is in FP8.
        """
        self.shape, self.weights, self.operators = shape, weights, operators
        self.products = choose_products(weights, operators, shape)
        self.adapters: DeviceAdapters | None = None
        """Adapters that rows may have; None: none may (`allow_adapters`)."""
        self._scales = kv_scales
        self.experts = ExpertLayers(shape, self.products, operators)
        self._mixers = [self._mixer_of(index) for index in range(len(weights.layers))]

    def allow_adapters(self, slots: int, max_rank: int) -> DeviceAdapters:
        """Let rows have adapters of rank up to `max_rank` in so many slots, and return these."""
        weights = self.weights
        self.adapters = DeviceAdapters(
            self.shape, self.operators, slots, max_rank, weights.dtype, weights.device
        )
        return self.adapters

    def mix(
        self,
        index: int,
        x: Rows,
        step: PackedStep,
        buffers: Activations,
        scratch: Any,
        growth: torch.Tensor | None,
    ) -> None:
        """Compute the first half of a layer of `x [T, hidden]`, attention, a recurrence or both, into
        `buffers.added`.
        """
        mixer, attends = self._mixers[index], self.shape.layers[index].attention
        if attends:
            self.attention(index, x, step, buffers, scratch, growth)
        if mixer is None:
            return
        assert isinstance(x, torch.Tensor), "a recurrence reads numbers that are not rounded"
        assert step.states is not None
        assert buffers.mixer is not None
        out = buffers.beside if attends else buffers.added
        assert out is not None
        mixer.mix(x, step.states.of_layer(index), buffers.mixer, out)
        if attends:
            buffers.added.add_(out)

    def _mixer_of(self, index: int) -> Mixer | None:
        """Return the recurrence of a layer; None where it has none."""
        shape, weights = self.shape.layers[index].recurrent, self.weights.layers[index].recurrent
        if shape is None or weights is None:
            return None
        return mixer_kind(shape).make(shape, weights, self.products, self.operators, self.shape.rms_eps)

    def attention(
        self,
        index: int,
        x: Rows,
        step: PackedStep,
        buffers: Activations,
        scratch: Any,
        growth: torch.Tensor | None,
    ) -> None:
        """Compute the first half of a layer of `x [T, hidden]`, into `buffers.added`."""
        self.project(index, x, step, buffers)
        if self.shape.qk_norm == "width":
            self._normalise_width(self.weights.layers[index], buffers)
        self.attend(index, step, buffers, scratch, growth)

    def project(self, index: int, x: Rows, step: PackedStep, buffers: Activations) -> None:
        """Compute queries, keys and values of `x [T, hidden]`, into `buffers.qkv`."""
        self.products.linear(x, self.weights.layers[index].qkv, out=buffers.qkv)
        self._change(index, "qkv", x, buffers.qkv, step)
        if (gate := self.weights.layers[index].q_gate) is not None:
            assert buffers.q_gate is not None
            self.products.linear(x, gate, out=buffers.q_gate)

    def attend(
        self,
        index: int,
        step: PackedStep,
        buffers: Activations,
        scratch: Any,
        growth: torch.Tensor | None,
    ) -> None:
        """Compute attention of `buffers.qkv`, whose keys and values are kept, into `buffers.added`."""
        layer = self.weights.layers[index]
        seen, slot = step.seen_by(index)
        fresh = [
            self._write(index, layer, step.lanes, (seen, slot), group, buffers, grows=growth is not None)
            for group in seen.groups
        ]
        if growth is not None:
            buffers.queries.mul_(growth)
        for group, rows in zip(seen.groups, fresh, strict=True):
            self._attend(index, slot, layer, group, buffers, scratch, rows)
        for seeing in seen.seeing:
            self._attend_beyond(index, slot, layer, seeing, buffers)
        mixed = buffers.mixed.view(len(buffers.mixed), -1)
        if layer.q_gate is not None:
            assert buffers.q_gate is not None
            mixed.mul_(buffers.q_gate.sigmoid_())
        self.products.linear(mixed, layer.output, out=buffers.added)
        self._change(index, "output", mixed, buffers.added, step)

    def feed_forward(self, index: int, x: Rows, step: PackedStep, buffers: Activations) -> None:
        """Compute the second half of a layer of `x [T, hidden]`, into `buffers.added`."""
        layer = self.weights.layers[index]
        if layer.experts is not None:
            assert isinstance(x, torch.Tensor)
            self.experts.forward(layer.experts, x, buffers)
            return
        assert layer.gate_up is not None
        assert layer.down is not None
        gate_up, inner = room = buffers.feed_forward(self.shape.intermediate_size)
        if not self.shape.gated:
            self.products.linear(x, layer.gate_up, out=inner)
            self.products.linear(activate_in_place(inner, self.shape), layer.down, out=buffers.added)
            return
        if step.adapters is None:
            self.products.feed_forward(x, layer.gate_up, layer.down, room, out=buffers.added)
            return
        # Between product and activation: the same bits in more launches.
        self.products.linear(x, layer.gate_up, out=gate_up)
        self._change(index, "gate_up", x, gate_up, step)
        self.operators.swiglu(gate_up, out=inner, **self.products.activation)
        self.products.linear(inner, layer.down, out=buffers.added)
        self._change(index, "down", inner, buffers.added, step)

    def _change(self, index: int, product: Product, x: Rows, out: torch.Tensor, step: PackedStep) -> None:
        """Add what the rows' adapters change of a product of `x [T, in]`."""
        if step.adapters is not None:
            assert isinstance(x, torch.Tensor)
            if self.adapters is None or step.adapter_scratch is None:
                raise RuntimeError("adapters were not allowed")
            self.adapters.add(index, product, x, out, step.adapters, step.adapter_scratch)

    def _normalise_width(self, layer: PackedLayer, buffers: Activations) -> None:
        """Normalise queries and keys in `buffers.qkv`, each over all its heads together."""
        for norm, part in zip((layer.q_norm, layer.k_norm), self.queries_and_keys(buffers.qkv), strict=True):
            assert norm is not None
            self.operators.rms_norm(part, norm, self.shape.rms_eps, out=part)

    def queries_and_keys(self, qkv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the queries and the keys in `qkv [T, ...]`, views."""
        shape = self.shape
        queries, keys = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
        return qkv[:, :queries], qkv[:, queries : queries + keys]

    def _scales_at(self, index: int, slot: int) -> torch.Tensor | None:
        """Return scales whose entry `slot`, the layer's place in a block, is that of layer `index`."""
        return None if self._scales is None else self._scales[index - slot :]

    def _write(
        self,
        index: int,
        layer: PackedLayer,
        lanes: torch.Tensor,
        seen: tuple[TableRows, int],
        group: Group,
        buffers: Activations,
        *,
        grows: bool,
    ) -> Any:
        """Rotate queries and keys of layer `index`, and write keys and values to the blocks of its table, at
        its place there (`PackedStep.seen_by`).

        Of decode rows alone, whose queries do not grow, attention does so itself: what it takes for that is
        returned, else None.
        """
        table, slot = seen
        shape, rows, rotation = self.shape, group.rows, self.shape.layers[index].rotation
        cos, sin = (None, None) if rotation is None else buffers.angles[rotation]
        by_head = shape.qk_norm == "head"
        qkv = buffers.qkv[rows].view(-1, shape.num_heads + 2 * shape.num_kv_heads, shape.head_dim)
        angles = None if cos is None else cos[rows], None if sin is None else sin[rows]
        norms: dict[str, Any] = {
            "q_norm": layer.q_norm if by_head else None,
            "k_norm": layer.k_norm if by_head else None,
            "norm_late": by_head and shape.qk_norm_after_rotation,
            "eps": shape.rms_eps,
        }
        alone = group.decodes is not None and not group.chunks and group.base is None and not grows
        if alone and self.operators.fresh_rows is not None:
            return self.operators.fresh_rows(qkv, *angles, table.block_ids[rows], lanes[rows], **norms)
        self.operators.rotary_write(
            qkv,
            *angles,
            group.blocks,
            slot,
            table.block_ids[rows],
            lanes[rows],
            heads=shape.num_heads,
            kv_heads=shape.num_kv_heads,
            scales=self._scales_at(index, slot),
            out=buffers.queries[rows],
            **norms,
            **_based(group),
        )
        return None

    def _attend_beyond(
        self, index: int, slot: int, layer: PackedLayer, seeing: SeeingRows, buffers: Activations
    ) -> None:
        """Compute the attention of a chunk whose tokens see beyond their own position, by torch: the kernel
        of chunks is causal.
        """
        buffers.mixed[seeing.rows] = paged_attention(
            buffers.queries[seeing.rows],
            seeing.blocks,
            slot,
            seeing.table,
            seeing.start,
            self.shape.window(index),
            self._scales_at(index, slot),
            scale=self.shape.score_scale,
            cap=self.shape.score_cap,
            sinks=layer.sinks,
            ends=seeing.ends,
        )

    def _attend(
        self,
        index: int,
        slot: int,
        layer: PackedLayer,
        group: Group,
        buffers: Activations,
        scratch: Any,
        fresh: Any,
    ) -> None:
        operators = self.operators
        rule: dict[str, Any] = {
            "window": self.shape.window(index),
            "scale": self.shape.score_scale,
            "cap": self.shape.score_cap,
            "sinks": layer.sinks,
            "scales": self._scales_at(index, slot),
        }
        if (decodes := group.decodes) is not None:
            operators.paged_decode(
                buffers.queries[decodes.rows],
                group.blocks,
                slot,
                decodes.tables,
                decodes.lengths,
                scratch=scratch,
                out=buffers.mixed[decodes.rows],
                **rule,
                **({} if fresh is None else {"fresh": fresh}),
            )
        for chunks in group.chunks:
            operators.paged_prefill(
                buffers.queries[chunks.rows],
                group.blocks,
                slot,
                chunks.tables,
                chunks.starts,
                chunks.offsets,
                max_tokens=chunks.max_tokens,
                context_tokens=chunks.context_tokens,
                tree=chunks.tree,
                out=buffers.mixed[chunks.rows],
                **_based(group),
                **rule,
            )


def activate_in_place(inner: torch.Tensor, shape: ModelShape) -> torch.Tensor:
    """Return `inner [T, n]`, which becomes its activation, in a model whose feed-forward has no gate."""
    if shape.activation == "relu2":
        return inner.relu_().square_()
    if shape.activation == "silu":
        return functional.silu(inner, inplace=True)
    raise ValueError(f"{shape.activation} without a gate")


def _based(group: Group) -> dict[str, torch.Tensor]:
    """Return the argument by which operators find a memory whose place is known to the device alone."""
    return {} if group.base is None else {"base": group.base}
