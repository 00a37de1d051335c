"""Weights of the parts that a rank computes: of every matrix its own rows or columns, and nothing else.

By rows    q, k, v and their biases (heads), gate and up (inner numbers), embed and head (vocabulary)
By columns o (heads), down (inner numbers)
Whole      norms, which every part needs; biases of o and down, which the first part alone adds

The vocabulary is cut as well: the embedding is a fifth of the bundled model, and one exchange of hidden rows
a step costs less than to hold it in every rank.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from diptych.engine.models.shape import UnsupportedModel
from diptych.engine.parallel.parts import Part
from diptych.engine.weights.canonical import Weights, assemble
from diptych.engine.weights.reader import WHOLE, Cut, OpenCheckpoint

_VOCAB_ROWS = frozenset({"embed", "head"})
_QUERY_ROWS = frozenset({"q", "q_bias"})
_KV_ROWS = frozenset({"k", "v", "k_bias", "v_bias"})
_INNER_ROWS = frozenset({"gate", "up", "gate_bias", "up_bias"})
_ONCE = frozenset({"o_bias", "down_bias"})


def cut_of(field: str, part: Part, head_dim: int) -> Cut:
    """Return the cut of a canonical tensor that `part` needs, by its name or its field in a layer."""
    if field in _VOCAB_ROWS:
        return Cut(rows=part.vocab)
    if field in _QUERY_ROWS:
        return Cut(rows=_lanes(part.heads, head_dim))
    if field in _KV_ROWS:
        return Cut(rows=_lanes(part.kv_heads, head_dim))
    if field == "sinks":
        return Cut(rows=part.heads)
    if field in _INNER_ROWS:
        return Cut(rows=part.inner)
    if field == "o":
        return Cut(columns=_lanes(part.heads, head_dim))
    return Cut(columns=part.inner) if field == "down" else WHOLE


def read_parts(opened: OpenCheckpoint, parts: Sequence[Part]) -> tuple[Weights, ...]:
    """Read the weights of `parts`, each those of a narrower model (`Part.shape_of`).

    Norms are read once and shared. Raises UnsupportedModel for a tensor of another shape than the model's,
    or one that cannot be cut.
    """
    whole: dict[str, torch.Tensor] = {}
    return tuple(_read_part(opened, part, whole) for part in parts)


def weight_bytes(parts: Sequence[Weights]) -> int:
    """Return the bytes of all tensors of `parts`, shared ones once."""
    tensors = {
        tensor.data_ptr(): tensor.nbytes
        for part in parts
        for record in (part, *part.layers)
        for tensor in vars(record).values()
        if isinstance(tensor, torch.Tensor)
    }
    return sum(tensors.values())


def _read_part(opened: OpenCheckpoint, part: Part, whole: dict[str, torch.Tensor]) -> Weights:
    def read(name: str) -> torch.Tensor:
        cut = cut_of(name.rpartition(".")[2], part, opened.shape.head_dim)
        if cut == WHOLE and name in whole:
            return whole[name]
        tensor = opened.read(name, cut)
        if not isinstance(tensor, torch.Tensor):
            raise UnsupportedModel(f"tensor {name}: quantised matrices are not computed in parts")
        if cut == WHOLE:
            whole[name] = tensor
        return tensor

    without = () if part.inner.start == 0 else _ONCE
    return assemble(part.shape_of(opened.shape), read, own_head=opened.own_head, without=without)


def _lanes(heads: range, head_dim: int) -> range:
    return range(heads.start * head_dim, heads.stop * head_dim)
