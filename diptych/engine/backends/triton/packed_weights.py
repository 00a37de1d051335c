"""A model's weights as the GPU multiplies them: on the device, matrices of one input joined into one.

Four products a layer instead of seven: at batch 1 a step is the reading of these bytes and little else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch

from diptych.engine.backends.triton.products.dense import Linear
from diptych.engine.backends.triton.products.experts import ExpertProduct, expert_product
from diptych.engine.backends.triton.products.make import dense_matrix, quantised_product
from diptych.engine.backends.triton.products.product import Product
from diptych.engine.weights import ExpertWeights, LayerWeights, Matrix, Weights
from kernels.packed_matrix import PackedMatrix
from kernels.scaled_matrix import ScaledMatrix


@dataclass(frozen=True)
class PackedExperts:
    """Experts of one layer on the device."""

    router: torch.Tensor
    """float32 `[E, hidden]`."""
    router_bias: torch.Tensor | None
    correction_bias: torch.Tensor | None
    gate_up: ExpertProduct
    down: ExpertProduct
    shared_gate_up: Linear | Product | None
    shared_down: Linear | Product | None
    shared_router: torch.Tensor | None
    """float32 `[1, hidden]`."""


@dataclass(frozen=True)
class PackedMixer:
    """Weights of one recurrent layer on the device."""

    products: Mapping[str, Linear | Product]
    """Matrices of one input, joined, by the names of `MixerKind.joined`."""
    tensors: Mapping[str, torch.Tensor]
    """Tensors that are no such matrix, by the names of `RecurrentShape.tensors`."""


PackMixer = Callable[[int, Mapping[str, Matrix], torch.device], PackedMixer]
"""Puts the tensors of a layer's recurrence on the device, of the layer's number."""


@dataclass(frozen=True)
class PackedLayer:
    """Tensors of one layer on the device."""

    input_norm: torch.Tensor | None
    qkv: Linear | Product
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    sinks: torch.Tensor | None
    """float32 `[heads]`."""
    q_gate: Linear | Product | None
    """Matrix whose product's sigmoid is the gate of what attention mixes, `[heads * head_dim, hidden]`."""
    output: Linear | Product
    attention_out_norm: torch.Tensor | None
    post_norm: torch.Tensor | None
    gate_up: Linear | Product | None
    down: Linear | Product | None
    feed_forward_out_norm: torch.Tensor | None
    experts: PackedExperts | None
    recurrent: PackedMixer | None = None


@dataclass(frozen=True)
class PackedWeights:
    """A model's tensors on the device."""

    embed: torch.Tensor
    layers: tuple[PackedLayer, ...]
    final_norm: torch.Tensor
    head: torch.Tensor | Product
    """`[vocab, hidden]`; the embedding itself where they are tied."""

    @property
    def dtype(self) -> torch.dtype:
        return self.embed.dtype

    @property
    def device(self) -> torch.device:
        return self.embed.device

    @property
    def read_bytes(self) -> int:
        """Bytes that a step reads: all but the embedding."""
        return _bytes_of(self.layers) + self.final_norm.nbytes + _bytes_of(self.head)

    @property
    def expert_bytes(self) -> int:
        """Bytes of `read_bytes` that belong to experts among which rows choose."""
        return sum(
            _bytes_of((layer.experts.gate_up, layer.experts.down))
            for layer in self.layers
            if layer.experts is not None
        )

    def products(self) -> Iterator[Product]:
        """Yield the matrices that are quantised."""
        for layer in self.layers:
            experts = (
                () if layer.experts is None else (layer.experts.shared_gate_up, layer.experts.shared_down)
            )
            mixer = () if layer.recurrent is None else layer.recurrent.products.values()
            for found in (layer.qkv, layer.q_gate, layer.output, layer.gate_up, layer.down, *experts, *mixer):
                if found is not None and not isinstance(found, Linear):
                    yield found
        if not isinstance(self.head, torch.Tensor):
            yield self.head


def _bytes_of(part: object) -> int:
    """Return the bytes of a tensor `[...]`, of a matrix of any kind, or of all parts of a record or tuple."""
    if part is None:
        return 0
    if isinstance(part, tuple):
        return sum(map(_bytes_of, part))
    if isinstance(part, Mapping):
        return sum(map(_bytes_of, part.values()))
    if isinstance(part, (PackedLayer, PackedExperts, PackedMixer, Linear)):
        return sum(map(_bytes_of, vars(part).values()))
    size = part.nbytes if isinstance(part, torch.Tensor) else getattr(part, "nbytes", 0)
    return int(size)


def pack(weights: Weights, device: torch.device, pack_mixer: PackMixer | None = None) -> PackedWeights:
    """Put `weights` on `device`, a layer at a time; `pack_mixer` those of recurrences, if there are any.

    Raises UnsupportedModel for matrices in the CPU's quantised forms.
    """
    embed = weights.embed.to(device)
    head = embed if weights.head is None else joined_product(device, (weights.head, None))
    return PackedWeights(
        embed=embed,
        layers=tuple(_layer(layer, device, index, pack_mixer) for index, layer in enumerate(weights.layers)),
        final_norm=weights.final_norm.to(device),
        head=head.weight if isinstance(head, Linear) else head,
    )


def _layer(
    layer: LayerWeights, device: torch.device, index: int, pack_mixer: PackMixer | None
) -> PackedLayer:
    recurrent = None
    if layer.recurrent is not None and pack_mixer is not None:
        recurrent = pack_mixer(index, layer.recurrent, device)
    return PackedLayer(
        input_norm=_moved(layer.input_norm, device),
        qkv=joined_product(device, (layer.q, layer.q_bias), (layer.k, layer.k_bias), (layer.v, layer.v_bias)),
        q_norm=_moved(layer.q_norm, device),
        k_norm=_moved(layer.k_norm, device),
        sinks=_moved(layer.sinks, device),
        q_gate=_optional(device, (layer.q_gate, None)),
        output=joined_product(device, (layer.o, layer.o_bias)),
        attention_out_norm=_moved(layer.attention_out_norm, device),
        post_norm=_moved(layer.post_norm, device),
        gate_up=_optional(device, (layer.gate, layer.gate_bias), (layer.up, layer.up_bias)),
        down=_optional(device, (layer.down, layer.down_bias)),
        feed_forward_out_norm=_moved(layer.feed_forward_out_norm, device),
        experts=None if layer.experts is None else _experts(layer.experts, device),
        recurrent=recurrent,
    )


def _experts(experts: ExpertWeights, device: torch.device) -> PackedExperts:
    gate_up = list(zip(experts.gates, experts.ups, strict=True))
    both = zip(experts.gate_biases, experts.up_biases, strict=True)
    return PackedExperts(
        router=experts.router.to(device),
        router_bias=_moved(experts.router_bias, device),
        correction_bias=_moved(experts.correction_bias, device),
        gate_up=expert_product(device, gate_up, [torch.cat(pair) for pair in both]),
        down=expert_product(device, [(matrix,) for matrix in experts.downs], experts.down_biases),
        shared_gate_up=_optional(device, (experts.shared_gate, None), (experts.shared_up, None)),
        shared_down=_optional(device, (experts.shared_down, None)),
        shared_router=_moved(experts.shared_router, device),
    )


def _moved(tensor: torch.Tensor | None, device: torch.device) -> torch.Tensor | None:
    return None if tensor is None else tensor.to(device)


def _optional(
    device: torch.device, *given: tuple[Matrix | None, torch.Tensor | None]
) -> Linear | Product | None:
    parts = [(matrix, bias) for matrix, bias in given if matrix is not None]
    return joined_product(device, *parts) if parts else None


def joined_product(device: torch.device, *parts: tuple[Matrix, torch.Tensor | None]) -> Linear | Product:
    """Return matrices of one input as one: of full numbers, quantised alike, or kind after kind."""
    if any(isinstance(weight, (PackedMatrix, ScaledMatrix)) for weight, _ in parts):
        return quantised_product(device, parts)
    joined = torch.cat([dense_matrix(weight).to(device) for weight, _ in parts])
    biases = [bias.to(device) for _, bias in parts if bias is not None]
    return Linear(joined, torch.cat(biases) if biases else None)
