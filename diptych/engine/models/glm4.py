"""GLM (glm-4-9b) and GLM-4 (0414): half of each head rotated, in pairs of neighbours; fused gate and up.

GLM-4 normalises around each sublayer.
"""

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
    "vocab_size": 151552,
    "hidden_size": 4096,
    "intermediate_size": 13696,
    "num_hidden_layers": 40,
    "num_attention_heads": 32,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "hidden_act": "silu",
    "max_position_embeddings": 131072,
    "rms_norm_eps": 0.00000015625,
    "tie_word_embeddings": False,
    "attention_bias": True,
    "eos_token_id": None,
}
_GATE_UP = ("gate", "up")
_LAYER: Names = {
    **LLAMA_LAYER,
    **{field: Stored("mlp.gate_up_proj.weight", _GATE_UP) for field in _GATE_UP},
}
_LAYER4: Names = {
    **_LAYER,
    "attention_out_norm": "post_self_attn_layernorm.weight",
    "feed_forward_out_norm": "post_mlp_layernorm.weight",
}
_GGUF_LAYER: Names = {
    **GGUF_LAYER,
    **{field: Stored("ffn_up.weight", _GATE_UP) for field in _GATE_UP},
}


def _resolve(resolved: dict[str, Any]) -> None:
    resolved.setdefault("partial_rotary_factor", 0.5)
    if resolved["eos_token_id"] is None:
        resolved["eos_token_id"] = [151329, 151336, 151338]


def _shape(config: Config, tied: bool, **switches: Any) -> ModelShape:
    return llama_shape(config, tied, output_bias=False, **switches)


def _shape4(config: Config, tied: bool) -> ModelShape:
    return _shape(config, tied, norms="around")


def _gguf(metadata: GgufMetadata, shape: ModelShape) -> ModelShape:
    return replace(shape, norms="around")


FAMILIES = (
    Family("glm", _DEFAULTS, _shape, layer=_LAYER, interleaved=True, resolve=_resolve, partial_rotary=True),
    Family(
        "glm4", _DEFAULTS, _shape4, layer=_LAYER4, interleaved=True, resolve=_resolve, partial_rotary=True
    ),
)
GGUF_FAMILIES = (GgufFamily("glm4", _gguf, layer=_GGUF_LAYER, interleaved=True),)
