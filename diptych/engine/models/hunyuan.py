"""Hunyuan, dense: norms of heads after the rotation, whose base is stretched by a fixed factor."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from diptych.engine.models.config_fields import llama_shape
from diptych.engine.models.family import LLAMA_LAYER, Config, Family, GgufFamily, GgufMetadata, Names
from diptych.engine.models.llama import LLAMA_DEFAULTS
from diptych.engine.models.shape import ModelShape, UnsupportedModel

_DEFAULTS = {
    **{field: value for field, value in LLAMA_DEFAULTS.items() if field != "mlp_bias"},
    "vocab_size": 290943,
    "rms_norm_eps": 1e-5,
}
_LAYER: Names = {
    **LLAMA_LAYER,
    "q_norm": "self_attn.query_layernorm.weight",
    "k_norm": "self_attn.key_layernorm.weight",
}


def _resolve(resolved: dict[str, Any]) -> None:
    """Put the base that `alpha` stretches in place of "dynamic", as which files declare it."""
    for field in ("rope_scaling", "rope_parameters"):
        rope = resolved.get(field)
        if not isinstance(rope, dict) or rope.get("rope_type", rope.get("type")) != "dynamic":
            continue
        alpha = rope.get("alpha")
        if not alpha:
            raise UnsupportedModel(f"{field}: rope_type 'dynamic' without alpha")
        width = resolved["head_dim"] or resolved["hidden_size"] // resolved["num_attention_heads"]
        theta = float(rope.get("rope_theta", resolved.get("rope_theta", 10000.0)))
        stretched = theta * float(alpha) ** (width / (width - 2))
        resolved[field] = {"rope_type": "default", "rope_theta": stretched}


def _shape(config: Config, tied: bool) -> ModelShape:
    return llama_shape(config, tied, qk_norm="head", qk_norm_after_rotation=True)


def _gguf(metadata: GgufMetadata, shape: ModelShape) -> ModelShape:
    return replace(shape, qk_norm="head", qk_norm_after_rotation=True)


FAMILIES = (Family("hunyuan_v1_dense", _DEFAULTS, _shape, layer=_LAYER, resolve=_resolve),)
GGUF_FAMILIES = (GgufFamily("hunyuan-dense", _gguf),)
