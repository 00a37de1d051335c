"""Weights of the parts that a rank computes: of every matrix its own rows or columns, and nothing else.

By rows    q, k, v and their biases (heads), gate and up (inner numbers), embed and head (vocabulary)
By columns o (heads), down (inner numbers)
By number  experts, where they are dealt whole
Whole      norms, routers and what makes latents, which every part needs; biases of o and down, which the
           first part alone adds; the expert of every token, where rows are sent to their experts

The vocabulary is cut as well: the embedding is a fifth of the bundled model, and one exchange of hidden rows
a step costs less than to hold it in every rank. The embedding is read by the first stage of a pipeline, the
output matrix by the last.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

import torch

from diptych.engine.models.shape import ModelShape, UnsupportedModel
from diptych.engine.parallel.parts import Part
from diptych.engine.parallel.stages import Stage
from diptych.engine.weights.canonical import Matrix, Weights, assemble
from diptych.engine.weights.loading_memory import LoadingMemory
from diptych.engine.weights.reader import WHOLE, Cut, OpenCheckpoint
from kernels.quantised_linear import BlockMatrix

_VOCAB_ROWS = frozenset({"embed", "head"})
_QUERY_ROWS = frozenset({"q", "q_bias", "q_gate"})
_KV_ROWS = frozenset({"k", "v", "k_bias", "v_bias"})
_INNER_ROWS = frozenset({"gate", "up", "gate_bias", "up_bias"})
_ONCE = frozenset({"o_bias", "down_bias"})


def cut_of(name: str, part: Part, shape: ModelShape) -> Cut:
    """Return the cut of a canonical tensor that `part` needs, by its name or its name below its layer's."""
    owner, _, field = name.rpartition(".")
    if field in _VOCAB_ROWS:
        return Cut(rows=part.vocab)
    if owner.startswith("experts"):
        return WHOLE if part.experts is not None else _of_inner(field, part.expert_inner)
    if owner == "shared":
        return WHOLE if part.sends_rows else _of_inner(field, part.shared_inner)
    if field in _INNER_ROWS or field == "down":
        return _of_inner(field, part.inner)
    if shape.latent is not None:
        return _of_latents(field, part, shape)
    if field in _QUERY_ROWS or (field == "q_norm" and shape.qk_norm == "width"):
        return Cut(rows=_lanes(part.heads, shape.head_dim))
    if field in _KV_ROWS or (field == "k_norm" and shape.qk_norm == "width"):
        return Cut(rows=_lanes(part.kv_heads, shape.head_dim))
    if field == "sinks":
        return Cut(rows=part.heads)
    return Cut(columns=_lanes(part.heads, shape.head_dim)) if field == "o" else WHOLE


def read_parts(opened: OpenCheckpoint, parts: Sequence[Part], stage: Stage) -> tuple[Weights, ...]:
    """Read the weights that `parts` have in the layers of `stage`, each those of a narrower model
    (`Part.shape_of`, `Stage.shape_of`).

    Tensors that all parts need whole are read once and shared. The process takes little more memory than the
    weights, and a piece of the files, at any time. Raises UnsupportedModel for a tensor of another shape than
    the model's, or one that cannot be cut.
    """
    whole: dict[str, torch.Tensor] = {}
    memory = LoadingMemory(opened.files)
    found = tuple(_read_part(opened, part, stage, whole, memory) for part in parts)
    memory.give_back()
    return found


def weight_bytes(parts: Sequence[Weights]) -> int:
    """Return the bytes of all tensors of `parts`, shared ones once."""
    return sum({tensor.data_ptr(): tensor.nbytes for part in parts for tensor in _tensors(part)}.values())


def _tensors(record: Any) -> Iterator[torch.Tensor]:
    if isinstance(record, torch.Tensor):
        yield record
    elif isinstance(record, tuple):
        for one in record:
            yield from _tensors(one)
    elif is_dataclass(record):
        for field in fields(record):
            yield from _tensors(getattr(record, field.name))


def _read_part(
    opened: OpenCheckpoint,
    part: Part,
    stage: Stage,
    whole: dict[str, torch.Tensor],
    memory: LoadingMemory,
) -> Weights:
    shape = opened.shape

    def read(name: str) -> Matrix:
        below = name
        if name.startswith("layers."):
            _, layer, below = name.split(".", 2)
            name = f"layers.{stage.layers.start + int(layer)}.{below}"
        cut = cut_of(below, part, shape)
        if cut == WHOLE and name in whole:
            return whole[name]
        tensor = opened.read(name, cut)
        if isinstance(tensor, BlockMatrix):
            raise UnsupportedModel(f"tensor {name}: blocks are not computed in parts")
        if cut == WHOLE and isinstance(tensor, torch.Tensor):
            whole[name] = tensor
        memory.took(sum(one.nbytes for one in _tensors(tensor)))
        return tensor

    def without(name: str) -> bool:
        """Return whether another part adds this bias."""
        of_whole_expert = part.experts is not None and name.startswith("experts.")
        return name.rpartition(".")[2] in _ONCE and not part.is_first and not of_whole_expert

    return assemble(
        stage.shape_of(part.shape_of(shape)),
        read,
        own_head=opened.own_head,
        without=without,
        has_embed=stage.is_first,
        has_head=stage.is_last,
    )


def _of_inner(field: str, inner: range) -> Cut:
    if field in _INNER_ROWS:
        return Cut(rows=inner)
    return Cut(columns=inner) if field == "down" else WHOLE


def _of_latents(field: str, part: Part, shape: ModelShape) -> Cut:
    """Return the cut of a tensor of attention over latents: these are whole, what they give is dealt."""
    latent = shape.latent
    assert latent is not None
    match field:
        case "q" | "q_b":
            return Cut(rows=_lanes(part.heads, latent.plain + shape.head_dim))
        case "k_b":
            return Cut(rows=_lanes(part.heads, latent.plain))
        case "v":
            return Cut(rows=_lanes(part.heads, latent.value))
        case "o":
            return Cut(columns=_lanes(part.heads, latent.value))
    return WHOLE


def _lanes(heads: range, head_dim: int) -> range:
    return range(heads.start * head_dim, heads.stop * head_dim)
