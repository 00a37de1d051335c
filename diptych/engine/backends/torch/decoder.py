"""The decoder: one definition that interprets every `ModelShape`. It is the meaning of the other backends.

Names carry shapes: T tokens of the step (all sequences in a row), H hidden, N query heads, K KV heads, D
head_dim. Attention is an argument, so that the definition knows nothing of blocks, pools or batches. A layer
whose feed-forward is experts has an `ExpertFeedForward` (experts.py).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, reduce

import torch
from torch.nn import functional

from diptych.engine.backends.torch.adapters import StepAdapters
from diptych.engine.backends.torch.experts import ExpertFeedForward
from diptych.engine.backends.torch.fused_layer import FusedLayer, dense, fuse
from diptych.engine.backends.torch.latent_attention import LatentAttention
from diptych.engine.backends.torch.recurrent.adapted import AdaptedRecurrence
from diptych.engine.backends.torch.recurrent.layer import RecurrentLayer, make_layer
from diptych.engine.batch import add_rows_after, put_rows
from diptych.engine.models.rope import cos_sin
from diptych.engine.models.shape import Activation, ModelShape
from diptych.engine.weights import ExpertWeights, LayerWeights, Storage, Weights
from kernels import byte_linear, quantised_linear
from kernels.layer_norm import layer_norm
from kernels.rms_norm import rms_norm
from kernels.rotary import rotary
from kernels.swiglu import clamped_swiglu, swiglu

Attend = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""`attend(layer, q_TND, k_TKD, v_TKD) -> [T, N, D]`: stores k and v, and attends over all that is stored.

Where attention is over latents, queries and latents take the place of all three (latent_attention.py).
"""
Recur = Callable[[int, RecurrentLayer, torch.Tensor], torch.Tensor]
"""`recur(layer, recurrence, mixed_TX) -> [T, Y]`: reads the states of the step's sequences, advances them by
their tokens and keeps what is behind them.
"""
Projected = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Queries `[T, N, D]`, keys and values `[T, K, D]`."""
Angles = dict[int, tuple[torch.Tensor, torch.Tensor]]
"""cos and sin `[T, D / 2]` of each rotation of the model."""

_LINEAR: dict[Storage, Callable[..., torch.Tensor]] = {
    "dense": functional.linear,
    "blocks": quantised_linear.quantised_linear,
    "bytes": byte_linear.linear,
}
"""Products as functional.linear has them, with dense weights; those of quantised ones quantise their input,
too.
"""


class Decoder:
    """Token ids in, normed rows of chosen tokens and their logits out."""

    def __init__(self, shape: ModelShape, weights: Weights) -> None:
        self.shape = shape
        self._embed = weights.embed
        # Quantised products give float32, and all that lies between them stays so.
        self.dtype = weights.embed.dtype if weights.storage == "dense" else torch.float32
        self._linear = _LINEAR[weights.storage]
        self.layers = [fuse(layer) for layer in weights.layers]
        self._latents = [self._latents_of(layer) for layer in weights.layers]
        self._experts = [self._experts_of(layer.experts) for layer in weights.layers]
        self._recurrent = [self._recurrent_of(index, layer) for index, layer in enumerate(weights.layers)]
        self.final_norm, self.final_norm_bias = weights.final_norm, weights.final_norm_bias
        self._head = dense(weights.output_matrix())

    @property
    def embedding(self) -> torch.Tensor:
        """The embedding, `[vocab, H]`."""
        return self._embed

    def forward(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        last: torch.Tensor,
        attend: Attend,
        wanted: Callable[[], bool],
        adapters: StepAdapters | None = None,
        given: tuple[torch.Tensor, torch.Tensor] | None = None,
        taps: dict[int, torch.Tensor] | None = None,
        recur: Recur | None = None,
    ) -> torch.Tensor | None:
        """Return the rows `last` of the step behind the final norm, `[len(last), H]`: `logits` reads them.

        `tokens` and `positions` are int64 `[T]`, these `[3, T]` where images lie on grids. `wanted` is asked
        before every layer; None is returned once it says no. `adapters` are those of rows that have one.
        `given` are embeddings `[rows, H]` in place of those of the tokens at the first of the pair; they are
        not scaled. `taps` gets the residual stream before those layers that it names; for the number behind
        the last layer's, that behind the final norm. `recur` is wanted by models with recurrent layers.
        """
        angles = self.angles(positions)
        growth = self.growth(positions)
        x_TH = self.scaled(functional.embedding(tokens, self._embed))
        put_rows(x_TH, given)
        for index, layer in enumerate(self.layers):
            if not wanted():
                return None
            if taps is not None and index in taps:
                taps[index] = x_TH
            x_TH = self._layer(index, layer, x_TH, angles, growth, attend, adapters, recur)
            add_rows_after(x_TH, given, index)
        if taps is not None and len(self.layers) in taps:
            taps[len(self.layers)] = self.norm(x_TH, self.final_norm, self.final_norm_bias)
        return self.norm(x_TH[last], self.final_norm, self.final_norm_bias)

    def through_layer(
        self, index: int, x_TH: torch.Tensor, positions: torch.Tensor, attend: Attend
    ) -> torch.Tensor:
        """Return the residual stream `[T, H]` behind layer `index`, of `x_TH` before it."""
        angles, growth = self.angles(positions), self.growth(positions)
        return self._layer(index, self.layers[index], x_TH, angles, growth, attend, None)

    def scaled(self, embedded_TH: torch.Tensor) -> torch.Tensor:
        """Return embeddings as they enter the residual."""
        x_TH = embedded_TH.to(self.dtype)
        if self.shape.embedding_scale == 1.0:
            return x_TH
        # Rounded like the residual, as Gemma was trained: sqrt(3072) is 55.5 in bfloat16.
        return x_TH * torch.tensor(self.shape.embedding_scale, dtype=self.dtype)

    def angles(self, positions: torch.Tensor) -> Angles:
        """Return cos and sin of each rotation at `positions`, `[T]` or `[3, T]`."""
        tables = (
            (number, cos_sin(self.shape, number, positions)) for number in range(len(self.shape.rotations))
        )
        return {number: (cos.to(self.dtype), sin.to(self.dtype)) for number, (cos, sin) in tables}

    def growth(self, positions: torch.Tensor) -> torch.Tensor | None:
        """Return the factor of each token's queries, `[T, 1, 1]`; None if it is 1 for all."""
        growth = self.shape.query_growth
        if growth is None or not self.shape.grows_queries:
            return None
        factors = 1 + growth.beta * torch.log(1 + torch.floor(positions / growth.length))
        return factors.to(self.dtype)[:, None, None]

    def _layer(
        self,
        index: int,
        layer: FusedLayer,
        x_TH: torch.Tensor,
        angles: Angles,
        growth: torch.Tensor | None,
        attend: Attend,
        adapters: StepAdapters | None,
        recur: Recur | None = None,
    ) -> torch.Tensor:
        of, normed = self.shape.layers[index], x_TH
        if of.mixes:
            normed = self.norm(x_TH, layer.input_norm, layer.input_norm_bias)
            mixed = [self._recurrence(index, normed, recur, adapters)] if of.recurrent is not None else []
            if of.attention:
                mixed.append(self.attention(index, layer, normed, angles, growth, attend, adapters))
            x_TH = x_TH + self.added(reduce(torch.add, mixed), layer.attention_out_norm)
        if not of.feed_forward:
            return x_TH
        if not self.shape.parallel_residual:
            normed = self.norm(x_TH, layer.post_norm, layer.post_norm_bias)
        fed = self.feed_forward(index, layer, normed, adapters)
        return x_TH + self.added(fed, layer.feed_forward_out_norm)

    def _recurrence(
        self, index: int, normed: torch.Tensor, recur: Recur | None, adapters: StepAdapters | None
    ) -> torch.Tensor:
        """Return what the recurrence of a layer gives for `normed [T, H]`, before its norm: `[T, H]`."""
        recurrent = self._recurrent[index]
        if recurrent is None or recur is None:
            raise ValueError(f"layer {index} is recurrent: it needs the states of the step's sequences")
        if adapters is not None:
            recurrent = AdaptedRecurrence(index, self.shape, recurrent, adapters)
        return recurrent.output(recur(index, recurrent, recurrent.project(normed)))

    def added(self, output: torch.Tensor, norm: torch.Tensor | None) -> torch.Tensor:
        """Return what a sublayer with this output adds to the residual."""
        normed = self.norm(output, norm, None)
        return normed if self.shape.residual_scale == 1.0 else normed * self.shape.residual_scale

    def norm(self, x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None) -> torch.Tensor:
        """Return `x` normalised, or as it is where the layer has no such norm."""
        if weight is None:
            return x
        if self.shape.norm == "layer":
            return layer_norm(x, weight, bias, self.shape.rms_eps)
        return rms_norm(x, weight, self.shape.rms_eps)

    def attention(
        self,
        index: int,
        layer: FusedLayer,
        normed: torch.Tensor,
        angles: Angles,
        growth: torch.Tensor | None,
        attend: Attend,
        adapters: StepAdapters | None,
    ) -> torch.Tensor:
        """Return what attention gives for `normed [T, H]`, before its norm: `[T, H]`."""
        latents = self._latents[index]
        if latents is not None:
            return latents(normed, *angles[0], lambda query, kept: attend(index, query, kept, kept))
        projected = self.project(index, layer, normed, adapters)
        gate = None if layer.q_gate is None else self._linear(normed, layer.q_gate)
        if gate is not None and adapters is not None:
            gate = adapters.add(index, ("q_gate",), normed, gate, gate.shape[1:])
        return self.mix(index, layer, projected, angles, growth, attend, adapters, gate=gate)

    def project(
        self, index: int, layer: FusedLayer, normed: torch.Tensor, adapters: StepAdapters | None
    ) -> Projected:
        """Return queries `[T, N, D]`, keys and values `[T, K, D]` of `normed [T, H]`, not normalised yet."""
        assert layer.qkv is not None
        shape = self.shape
        heads, kv_heads, width = shape.num_heads, shape.num_kv_heads, shape.head_dim
        joined = self._linear(normed, layer.qkv, layer.qkv_bias)
        if adapters is not None:
            widths = heads * width, kv_heads * width, kv_heads * width
            joined = adapters.add(index, ("q", "k", "v"), normed, joined, widths)
        q_TND, k_TKD, v_TKD = joined.view(-1, heads + 2 * kv_heads, width).split(
            [heads, kv_heads, kv_heads], dim=1
        )
        return q_TND, k_TKD, v_TKD

    def mix(
        self,
        index: int,
        layer: FusedLayer,
        projected: Projected,
        angles: Angles,
        growth: torch.Tensor | None,
        attend: Attend,
        adapters: StepAdapters | None,
        mean_squares: tuple[torch.Tensor | None, torch.Tensor | None] = (None, None),
        gate: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return what attention gives for queries, keys and values, before its norm: `[T, H]`.

        `mean_squares` are those of all heads' queries and keys, `[T, 1]`, where these are a part of them.
        `gate [T, N * D]` is what the sigmoid of the output's gate is taken of.
        """
        shape = self.shape
        q_TND, k_TKD, v_TKD = projected
        of_q, of_k = mean_squares
        if not shape.qk_norm_after_rotation:
            q_TND = self._qk_norm(q_TND, layer.q_norm, of_q)
            k_TKD = self._qk_norm(k_TKD, layer.k_norm, of_k)
        rotation = shape.layers[index].rotation
        if rotation is not None:
            q_TND, k_TKD = rotary(q_TND, *angles[rotation]), rotary(k_TKD, *angles[rotation])
        if shape.qk_norm_after_rotation:
            q_TND = self._qk_norm(q_TND, layer.q_norm, of_q)
            k_TKD = self._qk_norm(k_TKD, layer.k_norm, of_k)
        if growth is not None:
            q_TND = q_TND * growth
        mixed = attend(index, q_TND, k_TKD, v_TKD)
        mixed = mixed.flatten(1) if gate is None else mixed.flatten(1) * torch.sigmoid(gate)
        out = self._linear(mixed, layer.o, layer.o_bias)
        return out if adapters is None else adapters.add(index, ("o",), mixed, out, out.shape[1:])

    def _qk_norm(
        self, x: torch.Tensor, weight: torch.Tensor | None, mean_square: torch.Tensor | None
    ) -> torch.Tensor:
        """Return `x [T, heads, D]` normalised over each head, or over all heads together."""
        if weight is None:
            return x
        if self.shape.qk_norm == "width":
            return rms_norm(x.flatten(1), weight, self.shape.rms_eps, mean_square).view(x.shape)
        return rms_norm(x, weight, self.shape.rms_eps)

    def feed_forward(
        self, index: int, layer: FusedLayer, normed: torch.Tensor, adapters: StepAdapters | None
    ) -> torch.Tensor:
        """Return what the feed-forward gives for `normed [T, H]`, before its norm: `[T, H]`."""
        shape, experts = self.shape, self._experts[index]
        if experts is not None:
            return experts(normed)
        assert layer.up is not None
        assert layer.down is not None
        inner = self._linear(normed, layer.up, layer.up_bias)
        if adapters is not None:
            fields = ("gate", "up") if shape.gated else ("up",)
            inner = adapters.add(index, fields, normed, inner, [shape.intermediate_size] * len(fields))
        activated = gated(shape.activation, inner) if shape.gated else activate(shape.activation, inner)
        out = self._linear(activated, layer.down, layer.down_bias)
        return out if adapters is None else adapters.add(index, ("down",), activated, out, out.shape[1:])

    def experts_of(self, index: int) -> ExpertFeedForward | None:
        """Return the experts of layer `index`; None where its feed-forward is dense."""
        return self._experts[index]

    def _latents_of(self, layer: LayerWeights) -> LatentAttention | None:
        latent = self.shape.latent
        return (
            None
            if latent is None or not layer.q.shape[0]
            else LatentAttention(self.shape, latent, layer, self._linear)
        )

    def _recurrent_of(self, index: int, layer: LayerWeights) -> RecurrentLayer | None:
        shape = self.shape.layers[index].recurrent
        if shape is None or layer.recurrent is None:
            return None
        tensors = {name: dense(tensor) for name, tensor in layer.recurrent.items()}
        return make_layer(shape, tensors, self._linear, self.shape.rms_eps)

    def _experts_of(self, weights: ExpertWeights | None) -> ExpertFeedForward | None:
        experts = self.shape.experts
        if weights is None or experts is None:
            return None
        kind = self.shape.activation
        act = partial(gated, kind, limit=experts.clamp) if experts.gated else partial(activate, kind)
        return ExpertFeedForward(experts, weights, self._linear, dense, act)

    def logits(self, x_TH: torch.Tensor) -> torch.Tensor:
        """Return float32 logits `[T, vocab]` of normed hidden rows."""
        shape = self.shape
        logits = self._linear(x_TH, self._head).float()
        if shape.logit_scale != 1.0:
            logits = logits * shape.logit_scale
        if shape.logit_cap is not None:
            logits = torch.tanh(logits / shape.logit_cap) * shape.logit_cap
        return logits


def activate(kind: Activation, x: torch.Tensor) -> torch.Tensor:
    """Return the activation of `x`, of the same shape."""
    match kind:
        case "silu":
            return functional.silu(x)
        case "gelu":
            return functional.gelu(x)
        case "gelu_tanh":
            return functional.gelu(x, approximate="tanh")
        case "relu2":
            return functional.relu(x).square()
    raise ValueError(f"{kind} has a gate")


def gated(kind: Activation, gate_up: torch.Tensor, limit: float | None = None) -> torch.Tensor:
    """Return `act(gate) * up` of `gate_up [T, 2 * n]`, the gate in the first half: `[T, n]`.

    `limit` is the bound of `clamped_swiglu`.
    """
    if kind == "silu":
        return swiglu(gate_up)
    if kind == "clamped_swiglu" and limit is not None:
        return clamped_swiglu(gate_up, limit)
    gate, up = gate_up.chunk(2, dim=-1)
    return activate(kind, gate) * up
