"""A model's weights handed to the native step, which packs them."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from diptych.engine.backends.native.recurrent import (
    PackedRecurrence,
    Part,
    native_recurrence,
    packed_recurrence,
)
from diptych.engine.backends.native.status import NativeError, check
from diptych.engine.models.rope import cos_sin
from diptych.engine.models.shape import Activation, ExpertsShape, LayerShape, ModelShape, Routing
from diptych.engine.weights import ExpertWeights, LayerWeights, Matrix, Weights
from kernels.byte_codes import CodedBytes
from kernels.byte_linear import ByteMatrix
from kernels.cpu import library as native
from kernels.quantised_linear import BlockFormat, BlockMatrix

_FORMATS: dict[BlockFormat, int] = {
    "q4_0": native.Q4_0,
    "q4_1": native.Q4_1,
    "q8_0": native.Q8_0,
    "q2_k": native.Q2_K,
    "q3_k": native.Q3_K,
    "q4_k": native.Q4_K,
    "q5_k": native.Q5_K,
    "q6_k": native.Q6_K,
    "iq4_xs": native.IQ4_XS,
    "iq4_nl": native.IQ4_NL,
    "mxfp4": native.MXFP4,
}
_ACTIVATIONS: dict[Activation, int] = {
    "silu": native.SILU,
    "gelu": native.GELU,
    "gelu_tanh": native.GELU_TANH,
    "relu2": native.RELU_SQUARED,
    "clamped_swiglu": native.CLAMPED_SWIGLU,
}
_ROUTINGS: dict[Routing, int] = {
    "softmax_then_topk": native.SOFTMAX_THEN_TOPK,
    "topk_then_softmax": native.TOPK_THEN_SOFTMAX,
    "sigmoid": native.SIGMOID,
}
_IN_FP32 = (native.ROUTER, native.RECURRENT_SIDE)


def native_shape(shape: ModelShape, dtype: int) -> native.Shape:
    """Return `shape` as the native step takes it; `dtype` is one of `native.FP32` and so on."""
    # Rounded like the residual of such weights, as Gemma was trained: sqrt(3072) is 55.5 in bfloat16.
    residual = torch.bfloat16 if dtype == native.BF16 else torch.float32
    growth = shape.query_growth if shape.grows_queries else None
    clamp = None if shape.experts is None else shape.experts.clamp
    return native.Shape(
        dtype=dtype,
        layers=shape.num_layers,
        hidden=shape.hidden_size,
        intermediate=shape.intermediate_size,
        heads=shape.num_heads,
        kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        vocab=shape.vocab_size,
        rms_epsilon=shape.rms_eps,
        query_scale=shape.score_scale,
        embedding_scale=torch.tensor(shape.embedding_scale, dtype=residual).item(),
        residual_scale=shape.residual_scale,
        logit_scale=shape.logit_scale,
        logit_cap=shape.logit_cap or 0.0,
        score_cap=shape.score_cap or 0.0,
        growth=0.0 if growth is None else growth.beta,
        growth_length=0 if growth is None else growth.length,
        activation=_ACTIVATIONS[shape.activation],
        clamp=clamp or 0.0,
        gated=shape.gated,
        norm_after_rotation=shape.qk_norm_after_rotation,
        sinks=shape.sinks,
        attention_gate=shape.attention_gate,
        experts=native.Experts() if shape.experts is None else _native_experts(shape.experts),
    )


def _native_experts(experts: ExpertsShape) -> native.Experts:
    return native.Experts(
        count=experts.num_experts,
        picked=experts.experts_per_token,
        intermediate=experts.intermediate_size,
        shared_intermediate=experts.shared_size,
        routing=_ROUTINGS[experts.routing],
        normalise=experts.normalise,
        scale=experts.scale,
        groups=experts.groups,
        picked_groups=experts.groups_per_token,
        best_two=experts.group_score == "best_two",
    )


def rotary_tables(shape: ModelShape, positions: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return cosines and sines at `positions`, `[n]` or `[3, n]`, for each of the model's rotations."""
    pairs = [cos_sin(shape, rotation, positions) for rotation in range(len(shape.rotations))]
    return [(cosines.contiguous(), sines.contiguous()) for cosines, sines in pairs]


def stored(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return a tensor as the native step reads it."""
    return tensor.detach().to(device="cpu", dtype=dtype).contiguous()


def pack_model(
    library: ctypes.CDLL, model: int, shape: ModelShape, weights: Weights, dtype: torch.dtype
) -> None:
    """Set all but embedding and rotary tables. Raises NativeError if a tensor is not what `shape` says."""
    packer = Packer(library, model, dtype)
    for index, layer in enumerate(weights.layers):
        packer.set_layer(index, shape, index)
        packer.pack_layer(index, shape.layers[index], layer)
    packer.set_vector(0, native.FINAL_NORM, weights.final_norm)
    packer.set_linear(0, native.HEAD, (weights.output_matrix(), None))


class Packer:
    """Hands tensors to one native model."""

    def __init__(self, library: ctypes.CDLL, model: int, dtype: torch.dtype) -> None:
        self._library = library
        self._model = model
        self._dtype = dtype

    def set_layer(self, index: int, shape: ModelShape, number: int) -> None:
        """Describe the native model's layer `index`, which is layer `number` of `shape`."""
        own = shape.layers[number]
        norms = own.norms or shape.norms
        layer = native.Layer(
            window=shape.window(number) or 0,
            rotation=-1 if own.rotation is None else own.rotation,
            experts=own.experts and own.feed_forward,
            attention=own.attention,
            feed_forward=own.feed_forward,
            norms_before=norms != "after",
            norms_after=norms != "before",
            recurrent=native_recurrence(shape, number),
        )
        check(self._library, self._library.diptych_set_layer(self._model, index, layer))

    def pack_layer(self, index: int, own: LayerShape, layer: LayerWeights) -> None:
        if own.attention:
            qkv = ((layer.q, layer.q_bias), (layer.k, layer.k_bias), (layer.v, layer.v_bias))
            self.set_linear(index, native.QKV, *qkv, (layer.q_gate, None))
            self.set_linear(index, native.OUTPUT, (layer.o, layer.o_bias))
        if own.recurrent is not None and layer.recurrent is not None:
            self.pack_recurrence(index, packed_recurrence(own.recurrent, layer.recurrent))
        self.set_vectors(index, layer)
        if layer.experts is not None:
            self.pack_experts(index, layer.experts)
        elif own.feed_forward:
            self.pack_dense(index, layer)

    def pack_recurrence(self, index: int, packed: PackedRecurrence) -> None:
        for which, parts in packed.matrices.items():
            self.set_linear(index, which, *parts)
        for which, vector in packed.vectors.items():
            self.set_vector(index, which, vector.flatten())

    def set_vectors(self, index: int, layer: LayerWeights) -> None:
        self.set_vector(index, native.INPUT_NORM, layer.input_norm)
        self.set_vector(index, native.POST_NORM, layer.post_norm)
        self.set_vector(index, native.ATTENTION_OUTPUT_NORM, layer.attention_out_norm)
        self.set_vector(index, native.FEED_FORWARD_OUTPUT_NORM, layer.feed_forward_out_norm)
        self.set_vector(index, native.QUERY_NORM, layer.q_norm)
        self.set_vector(index, native.KEY_NORM, layer.k_norm)
        self.set_vector(index, native.SINKS, layer.sinks)

    def pack_dense(self, index: int, layer: LayerWeights) -> None:
        gate_up = ((layer.gate, layer.gate_bias), (layer.up, layer.up_bias))
        self.set_linear(index, native.GATE_UP, *gate_up)
        self.set_linear(index, native.DOWN, (layer.down, layer.down_bias))

    def pack_experts(self, index: int, experts: ExpertWeights) -> None:
        self.pack_router(index, experts)
        for number in range(len(experts.downs)):
            for which, parts in _of_expert(number, experts):
                made = _native_parts(parts, self._dtype)
                status = self._library.diptych_set_expert(
                    self._model, index, number, which, made.matrices, len(made.matrices)
                )
                check(self._library, status)
        for which, parts in _of_shared_expert(experts):
            self.set_linear(index, which, *parts)

    def pack_router(self, index: int, experts: ExpertWeights) -> None:
        self.set_linear(
            index, native.ROUTER, (experts.router, experts.router_bias), (experts.shared_router, None)
        )
        self.set_vector(index, native.ROUTER_CORRECTION, experts.correction_bias)

    def pack_part_experts(self, index: int, part: int, numbers: range, experts: ExpertWeights) -> None:
        """Set what a part of a rank's share has of a layer's experts, which are `numbers` of the model's."""
        for own, number in enumerate(numbers):
            for which, parts in _of_expert(own, experts):
                made = _native_parts(parts, self._dtype)
                status = self._library.diptych_set_part_expert(
                    self._model, index, part, number, which, made.matrices, len(made.matrices)
                )
                check(self._library, status)
        for which, parts in _of_shared_expert(experts):
            self.set_part_linear(index, part, which, *parts)

    def set_linear(self, layer: int, which: int, *parts: Part) -> None:
        made = _native_parts(parts, torch.float32 if which in _IN_FP32 else self._dtype)
        status = self._library.diptych_set_linear(
            self._model, layer, which, made.matrices, len(made.matrices)
        )
        check(self._library, status)

    def set_part_linear(self, layer: int, part: int, which: int, *parts: Part) -> None:
        made = _native_parts(parts, self._dtype)
        status = self._library.diptych_set_part_linear(
            self._model, layer, part, which, made.matrices, len(made.matrices)
        )
        check(self._library, status)

    def set_vector(self, layer: int, which: int, vector: torch.Tensor | None) -> None:
        if vector is None:
            return
        values = stored(vector, torch.float32)
        check(
            self._library,
            self._library.diptych_set_vector(self._model, layer, which, values.data_ptr(), len(values)),
        )


def _of_expert(number: int, experts: ExpertWeights) -> Iterator[tuple[int, Sequence[Part]]]:
    """Yield which matrices an expert has, and their parts; `number` is its place in `experts`."""

    def part(matrices: Sequence[Matrix], biases: Sequence[torch.Tensor]) -> Part:
        return matrices[number] if matrices else None, biases[number] if biases else None

    yield native.GATE_UP, (part(experts.gates, experts.gate_biases), part(experts.ups, experts.up_biases))
    yield native.DOWN, (part(experts.downs, experts.down_biases),)


def _of_shared_expert(experts: ExpertWeights) -> Iterator[tuple[int, Sequence[Part]]]:
    if experts.shared_down is not None:
        yield native.SHARED_GATE_UP, ((experts.shared_gate, None), (experts.shared_up, None))
        yield native.SHARED_DOWN, ((experts.shared_down, None),)


class _NativeParts(NamedTuple):
    """Parts of a matrix as the native step takes them, and the tensors that they point into."""

    matrices: ctypes.Array[native.Matrix]
    alive: list[torch.Tensor]


def _native_parts(parts: Sequence[Part], dense: torch.dtype) -> _NativeParts:
    """Return the parts that there are; matrices that are not quantised are stored in `dense`."""
    present = [(matrix, bias) for matrix, bias in parts if matrix is not None]
    matrices = (native.Matrix * len(present))()
    alive: list[torch.Tensor] = []

    def address(tensor: torch.Tensor) -> int:
        alive.append(tensor.contiguous())
        return alive[-1].data_ptr()

    for part, (matrix, bias) in zip(matrices, present, strict=True):
        part.rows, part.columns = matrix.shape
        match matrix:
            case BlockMatrix():
                part.format, part.data = _FORMATS[matrix.format], address(matrix.blocks)
            case ByteMatrix():
                part.format, part.data = native.I8, address(matrix.values)
                part.scales = address(matrix.scales)
            case CodedBytes():
                part.format, part.data = native.I8_CODED, address(matrix.codes)
                part.scales, part.slopes = address(matrix.scales), address(matrix.slopes)
            case torch.Tensor():
                part.data = address(stored(matrix, dense))
            case _:
                raise NativeError("matrices as a GPU step reads them are multiplied on GPUs only")
        if bias is not None:
            part.bias = address(bias.float())
    return _NativeParts(matrices, alive)
