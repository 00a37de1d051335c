"""The layout of a model's blocks, by its shape."""

from __future__ import annotations

from dataclasses import replace

import torch

from diptych.engine.kv.kv_memory import KVLayout
from diptych.engine.kv.state_groups import state_groups
from diptych.engine.kv.state_layout import state_layout
from diptych.engine.models.shape import ModelShape, UnsupportedModel


def kv_layout(shape: ModelShape, dtype: torch.dtype, block_size: int) -> KVLayout:
    """Return the layout of blocks of `block_size` tokens of a model of `shape`, with keys and values in
    `dtype`.

    A model with recurrent layers has its states in pages. Raises UnsupportedModel for latents beside them,
    and for blocks that are too small for states.
    """
    if shape.latent is not None:
        if shape.recurrent_layers:
            raise UnsupportedModel("recurrent layers beside attention over latents")
        return KVLayout(shape.num_layers, 1, shape.kept_numbers, block_size, dtype, latent=True)
    layout = KVLayout(shape.num_layers, shape.num_kv_heads, shape.head_dim, block_size, dtype)
    return _with_pages(layout, shape) if shape.recurrent_layers else layout


def kept_states(shape: ModelShape) -> list[tuple[int, tuple[tuple[int, ...], ...]]]:
    """Return the numbers of the recurrent layers of `shape`, with the shapes of each one's states."""
    return [(number, one.recurrent.states) for number, one in enumerate(shape.layers) if one.recurrent]


def _with_pages(layout: KVLayout, shape: ModelShape) -> KVLayout:
    """Return the layout of blocks that have the layers that attend, and pages of the others' states."""
    attends = [layer.attention for layer in shape.layers]
    block_bytes = replace(layout, num_layers=sum(attends)).own_bytes
    try:
        states = state_layout(kept_states(shape), block_bytes)
    except ValueError as error:
        raise UnsupportedModel(f"--block-size {layout.block_size}: {error}") from error
    return replace(layout, windows=state_groups(attends, states.blocks), states=states)
