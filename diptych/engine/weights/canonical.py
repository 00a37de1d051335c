"""The canonical tensors of a decoder; the package's docstring has their shapes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch

from diptych.engine.models.shape import ModelShape, UnsupportedModel
from kernels.byte_codes import CodedBytes
from kernels.byte_linear import ByteMatrix
from kernels.quantised_linear import BlockMatrix

Matrix = torch.Tensor | BlockMatrix | ByteMatrix | CodedBytes

Storage = Literal["dense", "blocks", "bytes"]
"""Kind of all matrices of a model: plain tensors, BlockMatrix, or ByteMatrix and CodedBytes."""


@dataclass(frozen=True)
class ExpertWeights:
    """The tensors of a layer's experts (`ExpertsShape`), a matrix for each expert in their order."""

    router: torch.Tensor
    """`[experts, hidden]`, float32 in every precision."""
    gates: tuple[Matrix, ...]
    ups: tuple[Matrix, ...]
    downs: tuple[Matrix, ...]
    router_bias: torch.Tensor | None = None
    correction_bias: torch.Tensor | None = None
    gate_biases: tuple[torch.Tensor, ...] = ()
    up_biases: tuple[torch.Tensor, ...] = ()
    down_biases: tuple[torch.Tensor, ...] = ()
    shared_gate: Matrix | None = None
    shared_up: Matrix | None = None
    shared_down: Matrix | None = None
    shared_router: torch.Tensor | None = None
    """`[1, hidden]`, float32: the gate of the shared expert's output."""


@dataclass(frozen=True)
class LayerWeights:
    """The tensors of one layer."""

    input_norm: torch.Tensor
    q: Matrix
    k: Matrix
    v: Matrix
    o: Matrix
    post_norm: torch.Tensor
    gate: Matrix
    up: Matrix
    down: Matrix
    q_bias: torch.Tensor | None = None
    k_bias: torch.Tensor | None = None
    v_bias: torch.Tensor | None = None
    o_bias: torch.Tensor | None = None
    q_norm: torch.Tensor | None = None
    k_norm: torch.Tensor | None = None
    gate_bias: torch.Tensor | None = None
    up_bias: torch.Tensor | None = None
    down_bias: torch.Tensor | None = None


@dataclass(frozen=True)
class Weights:
    """The tensors of a model."""

    embed: torch.Tensor
    layers: tuple[LayerWeights, ...]
    final_norm: torch.Tensor
    head: Matrix | None
    """None: the output matrix is `embed`."""

    @property
    def storage(self) -> Storage:
        """Kind of the model's matrices."""
        match self.layers[0].q:
            case BlockMatrix():
                return "blocks"
            case ByteMatrix() | CodedBytes():
                return "bytes"
            case _:
                return "dense"

    def output_matrix(self) -> Matrix:
        """`[vocab, hidden]`: what turns the last hidden state into logits."""
        return self.embed if self.head is None else self.head


@dataclass(frozen=True)
class Checkpoint:
    """Contents of a model's files."""

    shape: ModelShape
    weights: Weights
    kv_scales: torch.Tensor | None = None
    """Scales of FP8 keys and values, float32 `[layers, 2, kv_heads]` (kernels/fp8_cache.py), or None."""


class BadModelFile(ValueError):
    """A file that is damaged, incomplete or not what it says it is."""


def layer_shapes(shape: ModelShape) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Name and shape of every tensor that a layer of `shape` has."""
    hidden, inner = shape.hidden_size, shape.intermediate_size
    queries, pairs = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    yield "input_norm", (hidden,)
    yield "q", (queries, hidden)
    yield "k", (pairs, hidden)
    yield "v", (pairs, hidden)
    yield "o", (hidden, queries)
    yield "post_norm", (hidden,)
    yield "gate", (inner, hidden)
    yield "up", (inner, hidden)
    yield "down", (hidden, inner)
    if shape.qkv_bias:
        yield "q_bias", (queries,)
        yield "k_bias", (pairs,)
        yield "v_bias", (pairs,)
    if shape.output_bias:
        yield "o_bias", (hidden,)
    if shape.qk_norm:
        yield "q_norm", (shape.head_dim,)
        yield "k_norm", (shape.head_dim,)
    if shape.mlp_bias:
        yield "gate_bias", (inner,)
        yield "up_bias", (inner,)
        yield "down_bias", (hidden,)


def assemble(shape: ModelShape, read: Callable[[str], Any], *, own_head: bool) -> Weights:
    """Build `Weights` from a reader of canonical names: `embed`, `final_norm`, `head`, `layers.N.<field>`.

    `own_head` says that the output matrix is a tensor of its own, read as `head`. Raises UnsupportedModel if
    a tensor has another shape than `shape` says.
    """

    def checked(name: str, expected: tuple[int, ...]) -> Any:
        tensor = read(name)
        if tuple(tensor.shape) != expected:
            raise UnsupportedModel(
                f"tensor {name} is {tuple(tensor.shape)}, the model's shape says {expected}"
            )
        return tensor.contiguous()

    matrix = (shape.vocab_size, shape.hidden_size)
    layers = []
    for layer in range(shape.num_layers):
        tensors = {name: checked(f"layers.{layer}.{name}", s) for name, s in layer_shapes(shape)}
        layers.append(LayerWeights(**tensors))
    return Weights(
        embed=checked("embed", matrix),
        layers=tuple(layers),
        final_norm=checked("final_norm", (shape.hidden_size,)),
        head=checked("head", matrix) if own_head else None,
    )
