"""The canonical tensors of a decoder; the package's docstring has their shapes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch

from diptych.engine.models.shape import (
    BadModelFile,
    ExpertsShape,
    LatentShape,
    LayerShape,
    ModelShape,
    UnsupportedModel,
)
from kernels.byte_codes import CodedBytes
from kernels.byte_linear import ByteMatrix
from kernels.packed_matrix import PackedMatrix
from kernels.quantised_linear import BlockMatrix
from kernels.scaled_matrix import ScaledMatrix

__all__ = ["BadModelFile", "Checkpoint", "ExpertWeights", "LayerWeights", "Matrix", "Storage", "Weights"]

Matrix = torch.Tensor | BlockMatrix | ByteMatrix | CodedBytes | PackedMatrix | ScaledMatrix

Storage = Literal["dense", "blocks", "bytes", "packed"]
"""Kind of a model's matrices: plain tensors, BlockMatrix, ByteMatrix and CodedBytes, or a GPU's PackedMatrix
and ScaledMatrix.
"""

RECURRENT = "recurrent."
"""Beginning of the canonical names of a recurrence's tensors, below the layer's."""
EXPERT = "experts.{}."
"""Beginning of the canonical names of an expert's tensors, below the layer's."""


@dataclass(frozen=True)
class ExpertWeights:
    """The tensors of a layer's experts (`ExpertsShape`), a matrix for each of `ExpertsShape.own` in order; no
    gates where these have none.
    """

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
    """The tensors of one layer; None is what its shape has not. One that does not attend has q, k, v and o
    without rows.
    """

    q: Matrix
    k: Matrix
    v: Matrix
    o: Matrix
    input_norm: torch.Tensor | None = None
    """Norm before attention, and before the feed-forward too where both read the same input."""
    post_norm: torch.Tensor | None = None
    """Norm before the feed-forward."""
    attention_out_norm: torch.Tensor | None = None
    """Norm of what attention adds to the residual."""
    feed_forward_out_norm: torch.Tensor | None = None
    """Norm of what the feed-forward adds to the residual."""
    gate: Matrix | None = None
    up: Matrix | None = None
    down: Matrix | None = None
    experts: ExpertWeights | None = None
    """The feed-forward of a layer whose shape says `experts`, in place of gate, up and down."""
    q_bias: torch.Tensor | None = None
    k_bias: torch.Tensor | None = None
    v_bias: torch.Tensor | None = None
    o_bias: torch.Tensor | None = None
    q_norm: torch.Tensor | None = None
    k_norm: torch.Tensor | None = None
    gate_bias: torch.Tensor | None = None
    up_bias: torch.Tensor | None = None
    down_bias: torch.Tensor | None = None
    input_norm_bias: torch.Tensor | None = None
    post_norm_bias: torch.Tensor | None = None
    q_gate: Matrix | None = None
    """`[heads * head_dim, hidden]`: gate of what attention mixes."""
    sinks: torch.Tensor | None = None
    """`[heads]`, float32: a logit beside each head's scores."""
    q_a: Matrix | None = None
    """Makes the queries' latent, where attention is over latents: `q` is made from that then, `k` makes a
    token's latent, `k_b` keys of it and `v` values.
    """
    k_b: Matrix | None = None
    q_a_bias: torch.Tensor | None = None
    q_a_norm: torch.Tensor | None = None
    latent_norm: torch.Tensor | None = None
    recurrent: Mapping[str, Matrix] | None = None
    """Weights of the recurrence by the names of `RecurrentShape.tensors`, where the shape has one."""


@dataclass(frozen=True)
class Weights:
    """The tensors of a model."""

    embed: torch.Tensor
    layers: tuple[LayerWeights, ...]
    final_norm: torch.Tensor
    head: Matrix | None
    """None: the output matrix is `embed`."""
    final_norm_bias: torch.Tensor | None = None

    @property
    def storage(self) -> Storage:
        """Kind of the model's matrices."""
        match next(layer.q for layer in self.layers if layer.q.shape[0]):
            case BlockMatrix():
                return "blocks"
            case ByteMatrix() | CodedBytes():
                return "bytes"
            case PackedMatrix() | ScaledMatrix():
                return "packed"
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


Sizes = Iterator[tuple[str, tuple[int, ...]]]
"""Canonical names, below their layer's, with the shape of each tensor."""


def field_of(name: str) -> str:
    """Return a canonical name below its layer's."""
    return name.split(".", 2)[2] if name.startswith("layers.") else name


def layer_shapes(shape: ModelShape, layer: int) -> Sizes:
    """Name and shape of every tensor that layer number `layer` of `shape` has."""
    of = shape.layers[layer]
    yield from _norm_shapes(shape, of)
    if of.attention:
        yield from _attention_shapes(shape)
    if of.recurrent is not None:
        for name, size in of.recurrent.tensors(shape.hidden_size):
            yield RECURRENT + name, size
    if not of.feed_forward:
        return
    if shape.experts is not None and of.experts:
        yield from _experts_shapes(shape.experts, shape.hidden_size)
    else:
        yield from _feed_forward_shapes(shape)


def _attention_shapes(shape: ModelShape) -> Sizes:
    hidden = shape.hidden_size
    queries, pairs = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    if shape.latent is not None:
        yield from _latent_shapes(shape, shape.latent)
    else:
        yield "q", (queries, hidden)
        yield "k", (pairs, hidden)
        yield "v", (pairs, hidden)
        yield "o", (hidden, queries)
    if shape.qkv_bias and shape.latent is None:
        yield "q_bias", (queries,)
        yield "k_bias", (pairs,)
        yield "v_bias", (pairs,)
    if shape.output_bias:
        yield "o_bias", (hidden,)
    if shape.qk_norm == "head":
        yield "q_norm", (shape.head_dim,)
        yield "k_norm", (shape.head_dim,)
    if shape.qk_norm == "width":
        yield "q_norm", (queries,)
        yield "k_norm", (pairs,)
    if shape.attention_gate:
        yield "q_gate", (queries, hidden)
    if shape.sinks:
        yield "sinks", (shape.num_heads,)


def _latent_shapes(shape: ModelShape, latent: LatentShape) -> Sizes:
    heads, hidden, kept = shape.num_heads, shape.hidden_size, latent.rank + shape.head_dim
    if latent.query_rank is not None:
        yield "q_a", (latent.query_rank, hidden)
        yield "q_a_norm", (latent.query_rank,)
        if shape.qkv_bias:
            yield "q_a_bias", (latent.query_rank,)
    queries = heads * (latent.plain + shape.head_dim)
    yield ("q", (queries, hidden)) if latent.query_rank is None else ("q_b", (queries, latent.query_rank))
    yield "k", (kept, hidden)
    yield "latent_norm", (latent.rank,)
    yield "k_b", (heads * latent.plain, latent.rank)
    yield "v", (heads * latent.value, latent.rank)
    yield "o", (hidden, heads * latent.value)
    if shape.qkv_bias:
        yield "k_bias", (kept,)


def _norm_shapes(shape: ModelShape, layer: LayerShape) -> Sizes:
    names = []
    mixer, feed_forward = layer.mixes, layer.feed_forward
    if shape.norms != "after":
        names += ["input_norm"] * mixer + ["post_norm"] * (feed_forward and not shape.parallel_residual)
    if shape.norms != "before":
        names += ["attention_out_norm"] * mixer + ["feed_forward_out_norm"] * feed_forward
    for name in names:
        yield name, (shape.hidden_size,)
        if shape.norm_bias:
            yield f"{name}_bias", (shape.hidden_size,)


def _feed_forward_shapes(shape: ModelShape) -> Sizes:
    hidden, inner = shape.hidden_size, shape.intermediate_size
    matrices = [("gate", (inner, hidden))] if shape.gated else []
    for name, size in [*matrices, ("up", (inner, hidden)), ("down", (hidden, inner))]:
        yield name, size
        if shape.mlp_bias:
            yield f"{name}_bias", size[:1]


def _experts_shapes(experts: ExpertsShape, hidden: int) -> Sizes:
    def matrices(prefix: str, inner: int) -> Sizes:
        if experts.gated:
            yield f"{prefix}gate", (inner, hidden)
        yield f"{prefix}up", (inner, hidden)
        yield f"{prefix}down", (hidden, inner)

    yield "router", (experts.num_experts, hidden)
    if experts.router_bias:
        yield "router_bias", (experts.num_experts,)
    if experts.correction_bias:
        yield "correction_bias", (experts.num_experts,)
    for number in experts.own:
        for name, size in matrices(EXPERT.format(number), experts.intermediate_size):
            yield name, size
            if experts.bias:
                yield f"{name}_bias", size[:1]
    if experts.shared_size:
        yield from matrices("shared.", experts.shared_size)
    if experts.shared_gate:
        yield "shared_router", (1, hidden)


def assemble(
    shape: ModelShape,
    read: Callable[[str], Any],
    *,
    own_head: bool,
    without: Callable[[str], bool] = lambda _: False,
    has_embed: bool = True,
    has_head: bool = True,
) -> Weights:
    """Build `Weights` from a reader of canonical names: `embed`, `final_norm`, `head`, `layers.N.<field>`.

    `own_head` says that the output matrix is a tensor of its own, read as `head`; `without` is asked for
    fields of layers that are left out. Where the layers are a stage of a model, `has_embed` and `has_head`
    say whether it begins with embeddings and ends with logits; what it does not need has no rows. Raises
    UnsupportedModel if a tensor has another shape than `shape` says.
    """

    def checked(name: str, expected: tuple[int, ...]) -> Any:
        tensor = read(name)
        if tuple(tensor.shape) != expected:
            raise UnsupportedModel(
                f"tensor {name} is {tuple(tensor.shape)}, the model's shape says {expected}"
            )
        return tensor.contiguous()

    matrix, width = (shape.vocab_size, shape.hidden_size), (shape.hidden_size,)
    layers = []
    for layer in range(shape.num_layers):
        sizes = ((name, size) for name, size in layer_shapes(shape, layer) if not without(name))
        tensors = {name: checked(f"layers.{layer}.{name}", size) for name, size in sizes}
        layers.append(layer_weights(shape, tensors))
    final_norm = checked("final_norm", width)
    # A tied output matrix is the embedding, which the last stage then reads for it.
    needs_embed = has_embed or (has_head and not own_head)
    embed = checked("embed", matrix) if needs_embed else _no_rows(layers[0], shape.hidden_size)
    head = checked("head", matrix) if own_head and has_head else None
    return Weights(
        embed=embed,
        layers=tuple(layers),
        final_norm=final_norm,
        head=head if has_head else _no_rows(layers[0], shape.hidden_size),
        final_norm_bias=checked("final_norm_bias", width) if shape.norm_bias else None,
    )


def _no_rows(layer: LayerWeights, width: int) -> torch.Tensor:
    """Return a matrix without rows, of the type of a layer's."""
    dtype = layer.o.dtype if isinstance(layer.o, torch.Tensor) else torch.float32
    return torch.empty((0, width), dtype=dtype)


def layer_weights(shape: ModelShape, tensors: Mapping[str, Any]) -> LayerWeights:
    """Return the record of a layer's tensors, given by the names of `layer_shapes`."""
    if "q_b" in tensors:  # queries made from a latent of their own
        tensors = {"q" if name == "q_b" else name: tensor for name, tensor in tensors.items()}
    recurrent = {n.removeprefix(RECURRENT): t for n, t in tensors.items() if n.startswith(RECURRENT)}
    tensors = {name: tensor for name, tensor in tensors.items() if not name.startswith(RECURRENT)}
    if "q" not in tensors:
        tensors = {**dict.fromkeys(("q", "k", "v", "o"), torch.empty((0, shape.hidden_size))), **tensors}
    if recurrent:
        tensors["recurrent"] = recurrent
    if "router" not in tensors:
        return LayerWeights(**tensors)
    assert shape.experts is not None
    beside = ("router", "router_bias", "correction_bias", "shared_router")
    numbers = shape.experts.own
    lists: dict[str, Any] = {
        plural: tuple(tensors[EXPERT.format(number) + name] for number in numbers)
        for name, plural in _PLURALS.items()
        if EXPERT.format(numbers.start) + name in tensors
    }
    lists.setdefault("gates", ())
    experts = ExpertWeights(
        **{name: tensors[name] for name in beside if name in tensors},
        **{name.replace(".", "_"): value for name, value in tensors.items() if name.startswith("shared.")},
        **lists,
    )
    own = {n: t for n, t in tensors.items() if n not in beside and not n.startswith(("experts.", "shared."))}
    return LayerWeights(**own, experts=experts)


_PLURALS = {
    "gate": "gates",
    "up": "ups",
    "down": "downs",
    "gate_bias": "gate_biases",
    "up_bias": "up_biases",
    "down_bias": "down_biases",
}
