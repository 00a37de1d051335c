"""Phi-3, Phi-4 and Phi-4-mini: Llama with fused matrices; partly rotated heads and longrope in some."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from diptych.engine.models.config_fields import llama_shape
from diptych.engine.models.family import (
    GGUF_LAYER,
    LLAMA_LAYER,
    Config,
    Family,
    GgufFamily,
    GgufMetadata,
    Names,
    Stored,
)
from diptych.engine.models.shape import ModelShape

_DEFAULTS = {
    "vocab_size": 32064,
    "hidden_size": 3072,
    "intermediate_size": 8192,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": None,
    "head_dim": None,
    "hidden_act": "silu",
    "max_position_embeddings": 4096,
    "original_max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "sliding_window": None,
    "eos_token_id": 32000,
}
_QKV, _GATE_UP = ("q", "k", "v"), ("gate", "up")
_LAYER: Names = {
    **LLAMA_LAYER,
    **{field: Stored("self_attn.qkv_proj.weight", _QKV) for field in _QKV},
    **{field: Stored("mlp.gate_up_proj.weight", _GATE_UP) for field in _GATE_UP},
}
_GGUF_LAYER: Names = {
    **GGUF_LAYER,
    **{field: Stored("attn_qkv.weight", _QKV) for field in _QKV},
    **{field: Stored("ffn_up.weight", _GATE_UP) for field in _GATE_UP},
}


def _resolve(resolved: dict[str, Any]) -> None:
    """Give longrope its name: it was "su" once, and "yarn" for a while."""
    for field in ("rope_scaling", "rope_parameters"):
        rope = resolved.get(field)
        if isinstance(rope, dict) and rope.get("rope_type", rope.get("type")) in ("su", "yarn"):
            resolved[field] = {**rope, "rope_type": "longrope"}


def _shape(config: Config, tied: bool) -> ModelShape:
    return llama_shape(config, tied)


def _gguf(metadata: GgufMetadata, shape: ModelShape) -> ModelShape:
    return replace(shape, qkv_bias=False)


FAMILIES = (
    Family(
        "phi3",
        _DEFAULTS,
        _shape,
        layer=_LAYER,
        window="every_layer",
        resolve=_resolve,
        partial_rotary=True,
    ),
)
GGUF_FAMILIES = (GgufFamily("phi3", _gguf, layer=_GGUF_LAYER),)
