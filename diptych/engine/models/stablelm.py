"""StableLM: LayerNorm with biases, partly rotated heads, in some models attention beside the feed-forward."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from diptych.engine.models.config_fields import llama_shape
from diptych.engine.models.family import (
    LLAMA_LAYER,
    LLAMA_MODEL,
    Config,
    Family,
    GgufFamily,
    GgufMetadata,
    Names,
)
from diptych.engine.models.shape import ModelShape

_DEFAULTS = {
    "vocab_size": 50304,
    "hidden_size": 2560,
    "intermediate_size": 6912,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "head_dim": None,
    "hidden_act": "silu",
    "max_position_embeddings": 4096,
    "layer_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "use_qkv_bias": False,
    "use_parallel_residual": False,
    "eos_token_id": 0,
}
_MODEL: Names = {**LLAMA_MODEL, "final_norm_bias": "model.norm.bias"}
_LAYER: Names = {
    **LLAMA_LAYER,
    "input_norm_bias": "input_layernorm.bias",
    "post_norm_bias": "post_attention_layernorm.bias",
}


def _resolve(resolved: dict[str, Any]) -> None:
    resolved["head_dim"] = None  # transformers ignores the file's
    resolved.setdefault("partial_rotary_factor", 0.25)


def _shape(config: Config, tied: bool) -> ModelShape:
    return llama_shape(
        config,
        tied,
        rms_eps=config["layer_norm_eps"],
        norm="layer",
        norm_bias=True,
        qkv_bias=config["use_qkv_bias"],
        parallel_residual=config["use_parallel_residual"],
    )


def _gguf(metadata: GgufMetadata, shape: ModelShape) -> ModelShape:
    parallel = not metadata.has("blk.0.ffn_norm.weight")
    return replace(shape, norm="layer", norm_bias=True, parallel_residual=parallel, qk_norm="none")


FAMILIES = (
    Family(
        "stablelm",
        _DEFAULTS,
        _shape,
        layer=_LAYER,
        model=_MODEL,
        hidden_is_whole_heads=True,
        resolve=_resolve,
        partial_rotary=True,
        neutral={"qk_layernorm": (None, False)},
    ),
)
GGUF_FAMILIES = (GgufFamily("stablelm", _gguf, read=frozenset({"use_parallel_residual"})),)
