"""Bytes and operations of a model, counted from its shape.

weights             the sum of all tensors' elements by the bytes of each
keys and values     2 x layers that attend x KV heads x head width x bytes, a token (Shazeer 2019 for fewer KV
                    heads); in int8 four bytes more a head (kernels/int8_cache.py)
recurrent states    float32, of each sequence once for the place that it is in and once for the one before; a
                    step in torch holds them once more (worker_process/recurrent_model.py)
latents             layers x width of a latent x bytes, a token, in their place (DeepSeek-V2 report, 2024)
products            2 x the parameters that a token is multiplied with (Kaplan et al. 2020, section 2.1)
attention           4 x heads x head width, a layer that attends, a pair of query and key: scores and the
                    sum of values
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

from diptych.engine.backends.triton.supports import supports
from diptych.engine.kv.state_layout import page_bytes
from diptych.engine.models.shape import ModelShape
from diptych.engine.weights.canonical import layer_shapes

BITS: Final = {"fp32": 32.0, "bf16": 16.0, "fp8": 8.0, "int8": 8.25, "int4": 4.25}
"""Bits of a matrix' element, with its share of a scale of 32 bits for 128 elements (int8, int4)."""
OPERANDS: Final = {"fp32": "bf16", "bf16": "bf16", "fp8": "fp8", "int8": "int8", "int4": "bf16"}
"""Operand types of products: weights of 4 bits are widened first."""
KV_BYTES: Final = {"fp32": 4.0, "bf16": 2.0, "fp8": 1.0}
_SCALE_BYTES: Final = 4
"""Bytes of the scale of a token's key, or value, of one head in int8."""
_KEPT_BYTES: Final = 2.0
"""Bytes of an element of embeddings and norms, which stay as they are."""


@dataclass(frozen=True)
class ModelCosts:
    """Bytes and operations of one model, whatever computes it."""

    parameters: int
    """Elements of all tensors, embeddings included."""
    active_parameters: int
    """Elements that one token is multiplied with."""
    weight_bytes: float
    dense_bytes: float
    """Bytes that every step reads: without the embeddings' rows, and without experts."""
    expert_bytes: float
    """Bytes of one expert of every layer that has experts."""
    num_experts: int
    experts_per_token: int
    kv_bytes: float
    """Bytes of keys and values of one token, over all layers."""
    state_bytes: float
    """Bytes of the recurrent states of one sequence, over all layers; 0 without recurrent ones."""
    held_bytes: float
    """Bytes of them that a step holds for each of its sequences beside the blocks: all where torch computes,
    none where the Triton step does.
    """
    pair_flops: float
    """Operations of attention for one query and one key, over all layers."""
    windows: tuple[int | None, ...]
    """Attention window of each layer that attends, in tokens; None is all."""
    operands: str
    layers: int
    hidden_size: int

    def step_bytes(self, batch: int) -> float:
        """Return bytes of weights that a decode step of `batch` tokens reads.

        Of the experts a step reads those that any token picks: with E experts and k a token, each as likely
        as the others, E(1 - (1 - k/E)^batch) of them are expected.
        """
        if not self.num_experts:
            return self.dense_bytes
        missed = (1 - self.experts_per_token / self.num_experts) ** batch
        return self.dense_bytes + self.expert_bytes * self.num_experts * (1 - missed)

    def attended(self, context: float) -> float:
        """Return tokens that a token after `context` others attends to, averaged over the layers."""
        seen = (context if window is None else min(context, window) for window in self.windows)
        return sum(seen) / len(self.windows)


def model_costs(shape: ModelShape, weights: str = "bf16", keys_and_values: str = "bf16") -> ModelCosts:
    """Count a model's bytes and operations with matrices in `weights` (`BITS`) and KV in `KV_BYTES`."""
    bytes_of = BITS[weights] / 8
    embedding = shape.vocab_size * shape.hidden_size
    head = 0 if shape.tied_embeddings else embedding
    matrices = experts = kept = router = 0
    for layer in range(shape.num_layers):
        for name, size in layer_shapes(shape, layer):
            elements = math.prod(size)
            if name.startswith("experts."):
                experts += elements
            elif name == "router":
                router += elements
            elif len(size) > 1:
                matrices += elements
            else:
                kept += elements
    kept += shape.hidden_size + router
    count = shape.experts.num_experts if shape.experts is not None else 0
    picked = shape.experts.experts_per_token if shape.experts is not None else 0
    head_bytes = embedding * (bytes_of if head else _KEPT_BYTES)
    states = _state_bytes(shape)
    dense_bytes = matrices * bytes_of + kept * _KEPT_BYTES + head_bytes
    return ModelCosts(
        parameters=matrices + experts + kept + embedding + head,
        active_parameters=matrices + router + embedding + (experts * picked // count if count else 0),
        weight_bytes=dense_bytes + experts * bytes_of + (embedding * _KEPT_BYTES if head else 0),
        dense_bytes=dense_bytes,
        expert_bytes=experts * bytes_of / count if count else 0.0,
        num_experts=count,
        experts_per_token=picked,
        kv_bytes=kv_bytes(shape, keys_and_values),
        state_bytes=float(states),
        held_bytes=0.0 if supports(shape) is None else float(states),
        pair_flops=float(shape.num_heads * len(shape.attention_layers) * _pair_flops(shape)),
        windows=tuple(shape.window(layer) for layer in shape.attention_layers),
        operands=OPERANDS[weights],
        layers=shape.num_layers,
        hidden_size=shape.hidden_size,
    )


def kv_bytes(shape: ModelShape, keys_and_values: str) -> float:
    """Return the bytes of keys and values of one token over all layers, in `KV_BYTES` or int8."""
    layers = len(shape.attention_layers)
    if keys_and_values == "int8":
        return float(layers * 2 * shape.num_kv_heads * (shape.head_dim + _SCALE_BYTES))
    return layers * shape.kept_numbers * KV_BYTES[keys_and_values]


def _state_bytes(shape: ModelShape) -> int:
    """Return the bytes of the recurrent states of one sequence."""
    kept = [layer.recurrent.states for layer in shape.layers if layer.recurrent is not None]
    return page_bytes(kept) if kept else 0


def _pair_flops(shape: ModelShape) -> int:
    """Return operations for one query and one key of one head: their score, and the sum of values."""
    if shape.latent is not None:
        return 2 * shape.kept_numbers + 2 * shape.latent.rank
    return 4 * shape.head_dim
