"""Rows of a file's tensor that make up a canonical one: parts of fused matrices, reordered lanes of heads."""

from __future__ import annotations

import torch

from diptych.engine.models.family import Stored
from diptych.engine.models.rope import lane_order
from diptych.engine.models.shape import BadModelFile, LatentShape, ModelShape
from diptych.engine.weights.canonical import layer_shapes

Rows = slice | torch.Tensor | None
"""Rows of a tensor; None is all, as they are."""

KEYS_AND_VALUES = ("k_b", "v")
"""Fields of a matrix that makes keys and values of latents, head by head."""
_ROTATED = ("q", "q_b", "k", "q_bias", "k_bias", "q_norm", "k_norm")


def rows_of(
    stored: Stored, name: str, shape: ModelShape, size: tuple[int, ...], *, interleaved: bool
) -> Rows:
    """Return the rows of a file's tensor of `size` that are the canonical tensor `layers.N.<field>`.

    `interleaved` says that the file pairs neighbouring lanes for the rotation. Raises BadModelFile for a
    tensor with another number of rows.
    """
    if not name.startswith("layers."):
        return None
    _, layer, field = name.split(".", 2)
    if shape.latent is not None and stored.rows_of == KEYS_AND_VALUES:
        return _latent_parts(stored, field, shape, shape.latent, size)
    if shape.latent is not None and field in _ROTATED:
        return _latent_rows(stored, field, shape, shape.latent, size, interleaved=interleaved)
    order = _lane_order(shape, interleaved) if field in _ROTATED else None
    if order is None and not stored.rows_of:
        return None
    sizes = dict(layer_shapes(shape, int(layer)))
    fields = stored.rows_of or (field,)
    counts = [sizes[one][0] for one in fields]
    if size[0] != sum(counts):
        raise BadModelFile(f"tensor {stored.name} is {size}, its rows should be {sum(counts)}")
    begin = sum(counts[: fields.index(field)])
    chosen = None if stored.rows is None else stored.rows(field, shape, int(layer))
    if order is None:
        return slice(begin, begin + sizes[field][0]) if chosen is None else chosen
    heads = sizes[field][0] // shape.head_dim
    within = (torch.arange(heads).unsqueeze(1) * shape.head_dim + torch.tensor(order)).flatten()
    return begin + within if chosen is None else chosen[within]


def _lane_order(shape: ModelShape, interleaved: bool) -> list[int] | None:
    widths = {rotation.width for rotation in shape.rotations}
    assert len(widths) == 1, "rotations of several widths would need an order each"
    return lane_order(shape.head_dim, widths.pop(), interleaved=interleaved)


def _latent_parts(
    stored: Stored, field: str, shape: ModelShape, latent: LatentShape, size: tuple[int, ...]
) -> Rows:
    """Return the rows of keys or values of a matrix that has both of each head."""
    width = latent.plain + latent.value
    if size[0] != shape.num_heads * width:
        raise BadModelFile(f"tensor {stored.name} is {size}, its rows should be {shape.num_heads * width}")
    lanes = torch.arange(latent.plain) if field == "k_b" else torch.arange(latent.plain, width)
    return (torch.arange(shape.num_heads).unsqueeze(1) * width + lanes).flatten()


def _latent_rows(
    stored: Stored,
    field: str,
    shape: ModelShape,
    latent: LatentShape,
    size: tuple[int, ...],
    *,
    interleaved: bool,
) -> Rows:
    """Return the rows with the rotated lanes in order: the last ones of each query's head, or of a latent."""
    order = lane_order(shape.head_dim, shape.head_dim, interleaved=interleaved)
    if order is None:
        return None
    heads, plain = (shape.num_heads, latent.plain) if field in ("q", "q_b") else (1, latent.rank)
    width = plain + shape.head_dim
    if size[0] != heads * width:
        raise BadModelFile(f"tensor {stored.name} is {size}, its rows should be {heads * width}")
    lanes = torch.cat([torch.arange(plain), plain + torch.tensor(order)])
    return (torch.arange(heads).unsqueeze(1) * width + lanes).flatten()
