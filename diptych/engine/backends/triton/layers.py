"""The decoder's layers as kernels, in the order of launches; the meaning is backends/torch/decoder.py.

Ten launches a layer, of which four are products: norm (with the residual's addition), qkv, rotary with the
write of keys and values, attention (two: of decode rows splits and their join, of chunks the gathering of
their contexts and the rest), output, norm with addition, gate and up, their activation (in the same launch
where rows are few), down. Norms of what a half adds, norms over the whole width of queries and keys, and
scales are launches of their own in the models that have them; so are experts (expert_layers.py). Rounding to
FP8 or int8 is in the launch of the norm or activation before (rounded_inputs.py), but for the output product.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from diptych.engine.backends.triton.activations import Activations, RotaryTables
from diptych.engine.backends.triton.adapters import DeviceAdapters, Product
from diptych.engine.backends.triton.batch_invariant import choose_products
from diptych.engine.backends.triton.expert_layers import ExpertLayers
from diptych.engine.backends.triton.operators import Operators
from diptych.engine.backends.triton.packed_step import Group, PackedStep, SeeingRows, TableRows
from diptych.engine.backends.triton.packed_weights import PackedLayer, PackedWeights
from diptych.engine.backends.triton.rounded_inputs import Norms, Rows
from diptych.engine.batch import rows_after
from diptych.engine.models.shape import ModelShape
from kernels.paged_attention import paged_attention


def always() -> bool:
    """Return True: the step cannot be aborted."""
    return True


class Layers:
    """Forward pass of one model, from token ids to logits.

    Allocates what `logits` returns, a factor a token where queries grow with their position, and for the
    attention of chunks what `step_plan.gathered_bytes` says at most; decode steps allocate nothing else.
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
        self.rotary = RotaryTables(shape, weights.device)
        self._products = choose_products(weights, operators, shape)
        self._norms = Norms(shape, operators)
        self._experts = ExpertLayers(shape, self._products, operators)
        self.adapters: DeviceAdapters | None = None
        """Adapters that rows may have; None: none may."""
        # Rounded like the residual, as in the meaning: sqrt(3072) is 55.5 in bfloat16.
        self._embedding_scale = float(torch.tensor(shape.embedding_scale, dtype=weights.dtype))

    def twin(self) -> Layers:
        """Return layers over the same weights, with tables, room and adapters of their own."""
        return Layers(self.shape, self.weights, self.operators, self._scales)

    def buffers(self, tokens: int) -> Activations:
        """Allocate buffers for up to `tokens` tokens."""
        weights = self.weights
        return Activations.make(self.shape, tokens, weights.dtype, weights.device, self.operators.make_routed)

    def hidden(
        self,
        step: PackedStep,
        buffers: Activations,
        scratch: Any,
        wanted: Callable[[], bool] = always,
        given: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> torch.Tensor | None:
        """Return the last layer's output, normalised: `[T, hidden]`, in `buffers`.

        `given` are places of tokens, and the embeddings `[rows, hidden]` that they have in place of their
        ids'.

        `buffers` has a row a token. `scratch` holds the decode rows' partial sums. `wanted` is asked before
        every layer; None is returned once it says no. The rotary tables must reach the step's positions.
        """
        weights, growth = self.weights, self._growth(step)
        torch.index_select(weights.embed, 0, step.tokens, out=buffers.residual)
        if self._embedding_scale != 1.0:
            buffers.residual.mul_(self._embedding_scale)
        if given is not None:
            rows = given[1][:, : buffers.residual.shape[1]]
            buffers.residual[given[0].to(buffers.residual.device)] = rows.to(buffers.residual)
        self.rotary.gather(step.positions, buffers.angles)
        whole = step.adapters is not None  # adapters multiply what is not rounded
        first, *others = [(one.input_norm, None if whole else one.qkv) for one in weights.layers]
        x = self._norms.first(*first, buffers)
        following = [*others, (weights.final_norm, None)]
        for index, (layer, next_half) in enumerate(zip(weights.layers, following, strict=True)):
            if not wanted():
                return None
            self._attention(index, layer, x, step, buffers, scratch, growth)
            gate_up = None if whole else layer.gate_up
            x = self._norms.add(layer.attention_out_norm, layer.post_norm, gate_up, buffers)
            self._feed_forward(index, layer, x, step, buffers)
            if (deep := rows_after(given, index, buffers.residual.shape[1])) is not None:
                buffers.added[deep[0].to(buffers.added.device)] += deep[1].to(buffers.added)
            x = self._norms.add(layer.feed_forward_out_norm, *next_half, buffers)
        assert isinstance(x, torch.Tensor)  # no product's alone
        return x

    def logits(self, hidden: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Float32 logits `[rows, vocab]` of rows of `hidden`."""
        if out is None:
            out = torch.empty((len(hidden), self.shape.vocab_size), dtype=torch.float32, device=hidden.device)
        self._products.head(hidden, out=out)
        if self.shape.logit_scale != 1.0:
            out.mul_(self.shape.logit_scale)
        if (cap := self.shape.logit_cap) is not None:
            out.div_(cap).tanh_().mul_(cap)
        return out

    def _growth(self, step: PackedStep) -> torch.Tensor | None:
        """Return the factor of each token's queries, `[T, 1, 1]`; None if it is 1 for all."""
        growth = self.shape.query_growth
        if growth is None or not self.shape.grows_queries:
            return None
        factors = 1 + growth.beta * torch.log(1 + torch.floor(step.positions / growth.length))
        return factors.to(self.weights.dtype)[:, None, None]

    def _change(self, index: int, product: Product, x: Rows, out: torch.Tensor, step: PackedStep) -> None:
        """Add what the rows' adapters change of a product of `x [T, in]`."""
        if step.adapters is not None:
            assert isinstance(x, torch.Tensor)
            if self.adapters is None or step.adapter_scratch is None:
                raise RuntimeError("adapters were not allowed")
            self.adapters.add(index, product, x, out, step.adapters, step.adapter_scratch)

    def _feed_forward(
        self, index: int, layer: PackedLayer, x: Rows, step: PackedStep, buffers: Activations
    ) -> None:
        """Compute the second half of a layer of `x [T, hidden]`, into `buffers.added`."""
        if layer.experts is not None:
            assert isinstance(x, torch.Tensor)
            self._experts.forward(layer.experts, x, buffers)
            return
        assert layer.gate_up is not None
        assert layer.down is not None
        gate_up, inner = room = buffers.feed_forward(self.shape.intermediate_size)
        if step.adapters is None:
            self._products.feed_forward(x, layer.gate_up, layer.down, room, out=buffers.added)
            return
        # Between product and activation: the same bits in more launches.
        self._products.linear(x, layer.gate_up, out=gate_up)
        self._change(index, "gate_up", x, gate_up, step)
        self.operators.swiglu(gate_up, out=inner, **self._products.activation)
        self._products.linear(inner, layer.down, out=buffers.added)
        self._change(index, "down", inner, buffers.added, step)

    def _attention(
        self,
        index: int,
        layer: PackedLayer,
        x: Rows,
        step: PackedStep,
        buffers: Activations,
        scratch: Any,
        growth: torch.Tensor | None,
    ) -> None:
        """Compute the first half of a layer of `x [T, hidden]`, into `buffers.added`."""
        self._products.linear(x, layer.qkv, out=buffers.qkv)
        self._change(index, "qkv", x, buffers.qkv, step)
        if self.shape.qk_norm == "width":
            self._normalise_width(layer, buffers)
        seen, slot = step.seen_by(index)
        for group in seen.groups:
            self._write(index, layer, step.lanes, (seen, slot), group, buffers)
        if growth is not None:
            buffers.queries.mul_(growth)
        for group in seen.groups:
            self._attend(index, slot, layer, group, buffers, scratch)
        for seeing in seen.seeing:
            self._attend_beyond(index, slot, layer, seeing, buffers)
        mixed = buffers.mixed.view(len(buffers.mixed), -1)
        self._products.linear(mixed, layer.output, out=buffers.added)
        self._change(index, "output", mixed, buffers.added, step)

    def _normalise_width(self, layer: PackedLayer, buffers: Activations) -> None:
        """Normalise queries and keys in `buffers.qkv`, each over all its heads together."""
        shape = self.shape
        queries, keys = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
        parts = ((layer.q_norm, slice(0, queries)), (layer.k_norm, slice(queries, queries + keys)))
        for norm, columns in parts:
            assert norm is not None
            part = buffers.qkv[:, columns]
            self.operators.rms_norm(part, norm, shape.rms_eps, out=part)

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
    ) -> None:
        """Rotate queries and keys of layer `index`, and write keys and values to the blocks of its table, at
        its place there (`PackedStep.seen_by`).
        """
        table, slot = seen
        shape, rows, rotation = self.shape, group.rows, self.shape.layers[index].rotation
        cos, sin = (None, None) if rotation is None else buffers.angles[rotation]
        by_head = shape.qk_norm == "head"
        self.operators.rotary_write(
            buffers.qkv[rows].view(-1, shape.num_heads + 2 * shape.num_kv_heads, shape.head_dim),
            None if cos is None else cos[rows],
            None if sin is None else sin[rows],
            group.blocks,
            slot,
            table.block_ids[rows],
            lanes[rows],
            heads=shape.num_heads,
            kv_heads=shape.num_kv_heads,
            q_norm=layer.q_norm if by_head else None,
            k_norm=layer.k_norm if by_head else None,
            norm_late=by_head and shape.qk_norm_after_rotation,
            eps=shape.rms_eps,
            scales=self._scales_at(index, slot),
            out=buffers.queries[rows],
            **_based(group),
        )

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


def _based(group: Group) -> dict[str, torch.Tensor]:
    """Return the argument by which operators find a memory whose place is known to the device alone."""
    return {} if group.base is None else {"base": group.base}
