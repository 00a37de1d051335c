"""Scales of an FP8 KV cache that come with a checkpoint: a number for a layer's keys and one for its values,
or one for each KV head of them.

The names are those of compressed-tensors (`self_attn.k_scale`, before `self_attn.k_proj.output_scale`) and of
ModelOpt (`self_attn.k_proj.k_scale`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from diptych.engine.models.shape import ModelShape
from diptych.engine.weights.canonical import BadModelFile

_NAMES = (
    ("self_attn.k_scale", "self_attn.v_scale"),
    ("self_attn.k_proj.k_scale", "self_attn.v_proj.v_scale"),
    ("self_attn.k_proj.output_scale", "self_attn.v_proj.output_scale"),
)


def read_kv_scales(
    shape: ModelShape, has: Callable[[str], bool], read: Callable[[str], torch.Tensor]
) -> torch.Tensor | None:
    """Return float32 `[layers, 2 (keys, values), kv_heads]`; None where the first layer has none.

    Raises BadModelFile for a layer without, for scales of another number of heads, and for one that is not a
    positive number.
    """
    names = next((pair for pair in _NAMES if has(f"model.layers.0.{pair[0]}")), None)
    if names is None:
        return None
    return torch.stack(
        [
            torch.stack([_of_heads(f"model.layers.{layer}.{name}", shape, read) for name in names])
            for layer in range(shape.num_layers)
        ]
    )


def is_kv_scale(name: str) -> bool:
    """Return whether a tensor of a checkpoint is a scale of the KV cache."""
    return name.endswith(tuple(f".{scale}" for pair in _NAMES for scale in pair))


def only_the_cache_is_quantised(quantization: Mapping[str, Any]) -> bool:
    """Return whether a `quantization_config` is about the KV cache alone, with weights as full numbers."""
    method, groups = quantization.get("quant_method"), quantization.get("config_groups")
    return method == "compressed-tensors" and bool(quantization.get("kv_cache_scheme")) and not groups


def _of_heads(name: str, shape: ModelShape, read: Callable[[str], torch.Tensor]) -> torch.Tensor:
    """`[kv_heads]`."""
    scale = read(name).float().flatten()
    if scale.numel() not in (1, shape.num_kv_heads):
        raise BadModelFile(f"tensor {name} has {scale.numel()} scales for {shape.num_kv_heads} KV heads")
    if not bool((torch.isfinite(scale) & (scale > 0)).all()):
        raise BadModelFile(f"tensor {name} is not a positive number")
    return scale.expand(shape.num_kv_heads).contiguous()
