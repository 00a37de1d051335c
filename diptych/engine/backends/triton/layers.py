"""The decoder's layers as kernels, in the order of launches; the meaning is backends/torch/decoder.py.

Seven launches a layer of few decode rows, of which four are products: norm (with the residual's addition),
qkv, attention (with norms and rotation of queries and keys, the write of keys and values, and the join of
splits), output, norm with addition, gate and up (with their activation), down. Chunks rotate and write in a
launch of their own, and long ones gather their contexts in another; of many rows the activation is one.
Norms of what a half adds, norms over the whole width of queries and keys, and scales are launches of their
own in the models that have them; so are experts (expert_layers.py). Rounding to FP8 or int8 is in the launch
of the norm or activation before (rounded_inputs.py), but for the output product.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from diptych.engine.backends.triton.activations import Activations, RotaryTables
from diptych.engine.backends.triton.adapters import DeviceAdapters
from diptych.engine.backends.triton.layer_halves import LayerHalves
from diptych.engine.backends.triton.operators import Operators
from diptych.engine.backends.triton.packed_step import PackedStep
from diptych.engine.backends.triton.packed_weights import PackedWeights
from diptych.engine.backends.triton.rounded_inputs import Matrix, Norms
from diptych.engine.batch import add_rows_after, put_rows
from diptych.engine.models.shape import ModelShape


def always() -> bool:
    """Return True: the step cannot be aborted."""
    return True


@dataclass(frozen=True)
class Half:
    """A half of a layer: what mixes tokens, or the feed-forward."""

    layer: int
    feeds: bool
    """True for the feed-forward."""
    begins: bool
    """True for the first half of a layer."""
    ends: bool
    """True for its last one."""
    norm: torch.Tensor | None
    """Weights of the norm before it."""
    product: Matrix
    """Product that alone reads what the norm gives; None: the numbers are wanted as they are."""
    out_norm: torch.Tensor | None


def layer_halves(shape: ModelShape, weights: PackedWeights) -> list[Half]:
    """Return the halves of a model's layers in their order: a layer may have one of the two only."""
    found = []
    for index, (of, layer) in enumerate(zip(shape.layers, weights.layers, strict=True)):
        qkv = layer.qkv if of.recurrent is None and layer.q_gate is None else None
        if of.mixes:
            ends = not of.feed_forward
            found.append(Half(index, False, True, ends, layer.input_norm, qkv, layer.attention_out_norm))
        if of.feed_forward:
            norm, out = layer.post_norm, layer.feed_forward_out_norm
            found.append(Half(index, True, not of.mixes, True, norm, layer.gate_up, out))
    return found


class Layers:
    """Forward pass of one model, from token ids to logits.

    Allocates what `logits` returns, a factor a token where queries grow with their position, and for the
    attention of chunks what `step_plan.gathered_bytes` says at most; decode steps allocate nothing else.
    """

    leads = True
    """True: logits are here, and tokens are sampled here."""
    paced = False
    """False: a step that nothing aborts may be launched at once."""

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
        self._halves = LayerHalves(shape, weights, operators, kv_scales)
        self._order = layer_halves(shape, weights)
        self._norms = Norms(shape, operators)
        self._embedding_scale = embedding_scale(shape, weights.dtype)

    @property
    def adapters(self) -> DeviceAdapters | None:
        """Adapters that rows may have; None: none may."""
        return self._halves.adapters

    def allow_adapters(self, slots: int, max_rank: int) -> None:
        """See `ForwardPass.allow_adapters`."""
        self._halves.allow_adapters(slots, max_rank)

    def twin(self) -> Layers:
        """Return layers over the same weights, with tables, room and adapters of their own."""
        return Layers(self.shape, self.weights, self.operators, self._scales)

    def buffers(self, tokens: int) -> Activations:
        """Allocate buffers for up to `tokens` tokens."""
        weights = self.weights
        return Activations.make(self.shape, tokens, weights.dtype, weights.device, self.operators.make_routed)

    def agree(self, tokens: torch.Tensor) -> None:
        """Do nothing: no other process computes this step."""

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
        weights = self.weights
        growth = query_growth(self.shape, step.positions, weights.dtype)
        torch.index_select(weights.embed, 0, step.tokens, out=buffers.residual)
        if self._embedding_scale != 1.0:
            buffers.residual.mul_(self._embedding_scale)
        put_rows(buffers.residual, given)
        self.rotary.gather(step.positions, buffers.angles)
        whole = step.adapters is not None  # adapters multiply what is not rounded
        first, *others = [(half.norm, None if whole else half.product) for half in self._order]
        x = self._norms.first(*first, buffers)
        following = [*others, (weights.final_norm, None)]
        for number, (half, next_half) in enumerate(zip(self._order, following, strict=True)):
            if half.begins and not wanted():
                return None
            if number == 0 and step.states is not None:
                step.states.begin(self.operators)
            if half.feeds:
                self._halves.feed_forward(half.layer, x, step, buffers)
            else:
                self._halves.mix(half.layer, x, step, buffers, scratch, growth)
            if half.ends:
                add_rows_after(buffers.added, given, half.layer)
            x = self._norms.add(half.out_norm, *next_half, buffers)
        assert isinstance(x, torch.Tensor)  # no product's alone
        if step.states is not None:
            step.states.end(self.operators, x)
        return x

    def logits(self, hidden: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Float32 logits `[rows, vocab]` of rows of `hidden`."""
        if out is None:
            out = torch.empty((len(hidden), self.shape.vocab_size), dtype=torch.float32, device=hidden.device)
        self._halves.products.head(hidden, out=out)
        return finished_logits(self.shape, out)


def embedding_scale(shape: ModelShape, dtype: torch.dtype) -> float:
    """Return the factor of embeddings, rounded like the residual: sqrt(3072) is 55.5 in bfloat16."""
    return float(torch.tensor(shape.embedding_scale, dtype=dtype))


def query_growth(shape: ModelShape, positions: torch.Tensor, dtype: torch.dtype) -> torch.Tensor | None:
    """Return the factor of each token's queries at `positions`, `[T, 1, 1]`; None if it is 1 for all."""
    growth = shape.query_growth
    if growth is None or not shape.grows_queries:
        return None
    factors = 1 + growth.beta * torch.log(1 + torch.floor(positions / growth.length))
    return factors.to(dtype)[:, None, None]


def finished_logits(shape: ModelShape, logits: torch.Tensor) -> torch.Tensor:
    """Scale and cap products with the output matrix, `[rows, n]`, in place."""
    if shape.logit_scale != 1.0:
        logits.mul_(shape.logit_scale)
    if (cap := shape.logit_cap) is not None:
        logits.div_(cap).tanh_().mul_(cap)
    return logits
