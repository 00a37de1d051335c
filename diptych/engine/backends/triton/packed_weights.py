"""A model's weights as the GPU multiplies them: on the device, matrices of one input joined into one.

Four products a layer instead of seven: at batch 1 a step is the reading of these bytes and little else.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from diptych.engine.models.shape import UnsupportedModel
from diptych.engine.weights import LayerWeights, Matrix, Weights


@dataclass(frozen=True)
class Linear:
    """A matrix and a bias; diptych/engine/backends/triton/linear.py multiplies by them."""

    weight: torch.Tensor
    """`[out, in]`, row-major."""
    bias: torch.Tensor | None
    """`[out]`."""


@dataclass(frozen=True)
class PackedLayer:
    """Tensors of one layer on the device."""

    input_norm: torch.Tensor
    qkv: Linear
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    output: Linear
    post_norm: torch.Tensor
    gate_up: Linear
    down: Linear


@dataclass(frozen=True)
class PackedWeights:
    """A model's tensors on the device."""

    embed: torch.Tensor
    layers: tuple[PackedLayer, ...]
    final_norm: torch.Tensor
    head: torch.Tensor
    """`[vocab, hidden]`; the embedding itself where they are tied."""

    @property
    def dtype(self) -> torch.dtype:
        return self.embed.dtype

    @property
    def device(self) -> torch.device:
        return self.embed.device


def pack(weights: Weights, device: torch.device) -> PackedWeights:
    """Put `weights` on `device`, a layer at a time. Raises UnsupportedModel for quantised matrices."""
    embed = weights.embed.to(device)
    head = embed if weights.head is None else _dense(weights.head).to(device)
    return PackedWeights(
        embed=embed,
        layers=tuple(_layer(layer, device) for layer in weights.layers),
        final_norm=weights.final_norm.to(device),
        head=head,
    )


def _layer(layer: LayerWeights, device: torch.device) -> PackedLayer:
    return PackedLayer(
        input_norm=_present(layer.input_norm).to(device),
        qkv=_linear(device, (layer.q, layer.q_bias), (layer.k, layer.k_bias), (layer.v, layer.v_bias)),
        q_norm=None if layer.q_norm is None else layer.q_norm.to(device),
        k_norm=None if layer.k_norm is None else layer.k_norm.to(device),
        output=_linear(device, (layer.o, layer.o_bias)),
        post_norm=_present(layer.post_norm).to(device),
        gate_up=_linear(device, (layer.gate, layer.gate_bias), (layer.up, layer.up_bias)),
        down=_linear(device, (layer.down, layer.down_bias)),
    )


def _linear(device: torch.device, *given: tuple[Matrix | None, torch.Tensor | None]) -> Linear:
    parts = [(matrix, bias) for matrix, bias in given if matrix is not None]
    joined = torch.cat([_dense(weight).to(device) for weight, _ in parts])
    biases = [bias.to(device) for _, bias in parts if bias is not None]
    return Linear(joined, torch.cat(biases) if biases else None)


def _present(norm: torch.Tensor | None) -> torch.Tensor:
    if norm is None:
        raise UnsupportedModel("layers without a norm before attention and feed-forward (supports.py)")
    return norm


def _dense(matrix: Matrix) -> torch.Tensor:
    if not isinstance(matrix, torch.Tensor):
        raise UnsupportedModel("quantised matrices are multiplied on CPUs only")
    return matrix
