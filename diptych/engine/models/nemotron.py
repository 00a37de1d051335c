"""Nemotron and Minitron: LayerNorm stored less one, squared ReLU without a gate, half of each head rotated.

Arcee (AFM-4.5B) has the same feed-forward between Llama's norms.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from diptych.engine.models.config_fields import llama_shape
from diptych.engine.models.family import (
    GGUF_LAYER,
    GGUF_MODEL,
    LLAMA_LAYER,
    LLAMA_MODEL,
    Config,
    Family,
    GgufFamily,
    GgufMetadata,
    Names,
    Stored,
)
from diptych.engine.models.llama import LLAMA_DEFAULTS
from diptych.engine.models.shape import ModelShape

_DEFAULTS = {
    "vocab_size": 256000,
    "hidden_size": 6144,
    "intermediate_size": 24576,
    "num_hidden_layers": 32,
    "num_attention_heads": 48,
    "num_key_value_heads": None,
    "head_dim": None,
    "hidden_act": "relu2",
    "max_position_embeddings": 4096,
    "norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
    "eos_token_id": 3,
}
_ARCEE = {
    **LLAMA_DEFAULTS,
    "hidden_size": 2560,
    "intermediate_size": 18432,
    "hidden_act": "relu2",
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "eos_token_id": 128001,
}
_MODEL: Names = {
    **LLAMA_MODEL,
    "final_norm": Stored("model.norm.weight", plus=1.0),
    "final_norm_bias": "model.norm.bias",
}
_LAYER: Names = {
    **LLAMA_LAYER,
    "input_norm": Stored("input_layernorm.weight", plus=1.0),
    "input_norm_bias": "input_layernorm.bias",
    "post_norm": Stored("post_attention_layernorm.weight", plus=1.0),
    "post_norm_bias": "post_attention_layernorm.bias",
}
_GGUF_LAYER: Names = {
    **GGUF_LAYER,
    "input_norm": Stored("attn_norm.weight", float32=True),
    "post_norm": Stored("ffn_norm.weight", float32=True),
}
_GGUF_MODEL: Names = {**GGUF_MODEL, "final_norm": Stored("output_norm.weight", float32=True)}


def _resolve(resolved: dict[str, Any]) -> None:
    resolved.setdefault("partial_rotary_factor", 0.5)


def _shape(config: Config, tied: bool) -> ModelShape:
    return llama_shape(config, tied, rms_eps=config["norm_eps"], norm="layer", norm_bias=True, gated=False)


def _arcee(config: Config, tied: bool) -> ModelShape:
    return llama_shape(config, tied, gated=False)


def _gguf_arcee(metadata: GgufMetadata, shape: ModelShape) -> ModelShape:
    bias = metadata.has("blk.0.ffn_up.bias")
    return replace(shape, activation="relu2", gated=False, mlp_bias=bias)


def _gguf(metadata: GgufMetadata, shape: ModelShape) -> ModelShape:
    return replace(_gguf_arcee(metadata, shape), norm="layer", norm_bias=True)


FAMILIES = (
    Family("nemotron", _DEFAULTS, _shape, layer=_LAYER, model=_MODEL, resolve=_resolve, partial_rotary=True),
    Family("arcee", _ARCEE, _arcee),
)
GGUF_FAMILIES = (
    GgufFamily("nemotron", _gguf, layer=_GGUF_LAYER, model=_GGUF_MODEL),
    GgufFamily("arcee", _gguf_arcee, interleaved=True),
)
