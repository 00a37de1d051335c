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
from diptych.engine.weights.canonical import Weights, layer_shapes, layer_weights
from diptych.engine.weights.reader import WHOLE, Cut, OpenCheckpoint

_QUERY_ROWS = frozenset({"q", "q_bias"})
_KV_ROWS = frozenset({"k", "v", "k_bias", "v_bias"})
_INNER_ROWS = frozenset({"gate", "up", "gate_bias", "up_bias"})
_ONCE = frozenset({"o_bias", "down_bias"})


def cut_of(field: str, part: Part, head_dim: int) -> Cut:
    """Return the cut of a layer's canonical tensor, by its field, that `part` needs."""
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
    shape, vocab = opened.shape, Cut(rows=part.vocab)
    layers = []
    for layer in range(shape.num_layers):
        tensors = {}
        for field, size in layer_shapes(shape, layer):
            if field not in _ONCE or part.inner.start == 0:
                cut = cut_of(field, part, shape.head_dim)
                tensors[field] = _read(opened, f"layers.{layer}.{field}", cut, size, whole)
        layers.append(layer_weights(part.shape_of(shape), tensors))
    matrix, width = (shape.vocab_size, shape.hidden_size), (shape.hidden_size,)
    return Weights(
        embed=_read(opened, "embed", vocab, matrix, whole),
        layers=tuple(layers),
        final_norm=_read(opened, "final_norm", WHOLE, width, whole),
        head=_read(opened, "head", vocab, matrix, whole) if opened.own_head else None,
        final_norm_bias=_read(opened, "final_norm_bias", WHOLE, width, whole) if shape.norm_bias else None,
    )


def _read(
    opened: OpenCheckpoint, name: str, cut: Cut, size: tuple[int, ...], whole: dict[str, torch.Tensor]
) -> torch.Tensor:
    if cut == WHOLE and name in whole:
        return whole[name]
    tensor = opened.read(name, cut)
    if not isinstance(tensor, torch.Tensor):
        raise UnsupportedModel(f"tensor {name}: quantised matrices are not computed in parts")
    expected = (
        size[0] if cut.rows is None else len(cut.rows),
        *(size[1:] if cut.columns is None else (len(cut.columns),)),
    )
    if tuple(tensor.shape) != expected:
        raise UnsupportedModel(f"tensor {name} is {tuple(tensor.shape)}, the model's shape says {expected}")
    tensor = tensor.contiguous()
    if cut == WHOLE:
        whole[name] = tensor
    return tensor


def _lanes(heads: range, head_dim: int) -> range:
    return range(heads.start * head_dim, heads.stop * head_dim)
