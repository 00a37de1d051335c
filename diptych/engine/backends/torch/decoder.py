"""The decoder: one definition with switches for Llama, Mistral, Ministral, Qwen2 and Qwen3.

Names carry shapes: T tokens of the step (all sequences in a row), H hidden, N query heads, K KV heads, D
head_dim. Attention is an argument, so that the definition knows nothing of blocks, pools or batches.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.nn import functional

from diptych.engine.models.rope import inverse_frequencies, rotary_magnitude
from diptych.engine.models.shape import ModelShape
from diptych.engine.weights import LayerWeights, Matrix, Storage, Weights
from kernels import byte_codes, byte_linear, quantised_linear
from kernels.byte_codes import CodedBytes
from kernels.byte_linear import ByteMatrix
from kernels.quantised_linear import BlockMatrix
from kernels.rms_norm import rms_norm
from kernels.rotary import rotary
from kernels.swiglu import swiglu

Attend = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""`attend(layer, q_TND, k_TKD, v_TKD) -> [T, N, D]`: stores k and v, and attends over all that is stored."""

_LINEAR: dict[Storage, Callable[..., torch.Tensor]] = {
    "dense": functional.linear,
    "blocks": quantised_linear.quantised_linear,
    "bytes": byte_linear.linear,
}
"""Products as functional.linear has them, with dense weights; those of quantised ones quantise their input,
too.
"""


@dataclass(frozen=True)
class _FusedLayer:
    """A layer with its matrices joined: four products a layer instead of seven."""

    input_norm: torch.Tensor
    qkv: torch.Tensor
    qkv_bias: torch.Tensor | None
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    o: torch.Tensor
    o_bias: torch.Tensor | None
    post_norm: torch.Tensor
    gate_up: torch.Tensor
    gate_up_bias: torch.Tensor | None
    down: torch.Tensor
    down_bias: torch.Tensor | None


class Decoder:
    """Token ids in, logits of chosen tokens out."""

    def __init__(self, shape: ModelShape, weights: Weights) -> None:
        self.shape = shape
        self._embed = weights.embed
        # Quantised products give float32, and all that lies between them stays so.
        self._dtype = weights.embed.dtype if weights.storage == "dense" else torch.float32
        self._linear = _LINEAR[weights.storage]
        self._layers = [_fuse(layer) for layer in weights.layers]
        self._final_norm = weights.final_norm
        self._head = _dense(weights.output_matrix())
        self._frequencies = inverse_frequencies(shape)
        self._magnitude = rotary_magnitude(shape)

    def forward(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        last: torch.Tensor,
        attend: Attend,
        wanted: Callable[[], bool],
    ) -> torch.Tensor | None:
        """Float32 logits `[len(last), vocab]` of the rows `last` of the step.

        `tokens` and `positions` are int64 `[T]`. `wanted` is asked before every layer; None is returned once
        it says no.
        """
        angles = positions.float().unsqueeze(1) * self._frequencies
        cos = (angles.cos() * self._magnitude).to(self._dtype)
        sin = (angles.sin() * self._magnitude).to(self._dtype)
        x_TH = functional.embedding(tokens, self._embed).to(self._dtype)
        for index, layer in enumerate(self._layers):
            if not wanted():
                return None
            x_TH = x_TH + self._attention(index, layer, x_TH, cos, sin, attend)
            x_TH = x_TH + self._feed_forward(layer, x_TH)
        x_TH = rms_norm(x_TH[last], self._final_norm, self.shape.rms_eps)
        return self._linear(x_TH, self._head).float()

    def _attention(
        self,
        index: int,
        layer: _FusedLayer,
        x_TH: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        attend: Attend,
    ) -> torch.Tensor:
        shape = self.shape
        heads, kv_heads, width = shape.num_heads, shape.num_kv_heads, shape.head_dim
        normed = rms_norm(x_TH, layer.input_norm, shape.rms_eps)
        joined = self._linear(normed, layer.qkv, layer.qkv_bias).view(-1, heads + 2 * kv_heads, width)
        q_TND, k_TKD, v_TKD = joined.split([heads, kv_heads, kv_heads], dim=1)
        if layer.q_norm is not None and layer.k_norm is not None:
            q_TND = rms_norm(q_TND, layer.q_norm, shape.rms_eps)
            k_TKD = rms_norm(k_TKD, layer.k_norm, shape.rms_eps)
        mixed = attend(index, rotary(q_TND, cos, sin), rotary(k_TKD, cos, sin), v_TKD)
        return self._linear(mixed.reshape(-1, heads * width), layer.o, layer.o_bias)

    def _feed_forward(self, layer: _FusedLayer, x_TH: torch.Tensor) -> torch.Tensor:
        normed = rms_norm(x_TH, layer.post_norm, self.shape.rms_eps)
        inner = swiglu(self._linear(normed, layer.gate_up, layer.gate_up_bias))
        return self._linear(inner, layer.down, layer.down_bias)


def _fuse(layer: LayerWeights) -> _FusedLayer:
    return _FusedLayer(
        input_norm=layer.input_norm,
        qkv=torch.cat([_dense(layer.q), _dense(layer.k), _dense(layer.v)]),
        qkv_bias=_join(layer.q_bias, layer.k_bias, layer.v_bias),
        q_norm=layer.q_norm,
        k_norm=layer.k_norm,
        o=_dense(layer.o),
        o_bias=layer.o_bias,
        post_norm=layer.post_norm,
        gate_up=torch.cat([_dense(layer.gate), _dense(layer.up)]),
        gate_up_bias=_join(layer.gate_bias, layer.up_bias),
        down=_dense(layer.down),
        down_bias=layer.down_bias,
    )


def _dense(matrix: Matrix) -> torch.Tensor:
    match matrix:
        case BlockMatrix():
            return quantised_linear.dequantise(matrix)
        case ByteMatrix():
            return byte_linear.dequantise(matrix)
        case CodedBytes():
            return byte_linear.dequantise(byte_codes.as_bytes(matrix))
        case _:
            return matrix


def _join(*biases: torch.Tensor | None) -> torch.Tensor | None:
    present = [bias for bias in biases if bias is not None]
    return torch.cat(present) if present else None
