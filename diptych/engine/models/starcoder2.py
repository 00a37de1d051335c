"""StarCoder2: LayerNorm with biases, and a feed-forward without a gate."""

from __future__ import annotations

from dataclasses import replace

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
    "vocab_size": 49152,
    "hidden_size": 3072,
    "intermediate_size": 12288,
    "num_hidden_layers": 30,
    "num_attention_heads": 24,
    "num_key_value_heads": 2,
    "head_dim": None,
    "hidden_act": "gelu_pytorch_tanh",
    "max_position_embeddings": 4096,
    "norm_epsilon": 1e-5,
    "tie_word_embeddings": True,
    "use_bias": True,
    "sliding_window": None,
    "eos_token_id": 50256,
}
_MODEL: Names = {**LLAMA_MODEL, "final_norm_bias": "model.norm.bias"}
_LAYER: Names = {
    **LLAMA_LAYER,
    "input_norm_bias": "input_layernorm.bias",
    "post_norm_bias": "post_attention_layernorm.bias",
    "up": "mlp.c_fc.weight",
    "up_bias": "mlp.c_fc.bias",
    "down": "mlp.c_proj.weight",
    "down_bias": "mlp.c_proj.bias",
}


def _shape(config: Config, tied: bool) -> ModelShape:
    bias = config["use_bias"]
    return llama_shape(
        config,
        tied,
        rms_eps=config["norm_epsilon"],
        norm="layer",
        norm_bias=True,
        gated=False,
        qkv_bias=bias,
        output_bias=bias,
        mlp_bias=bias,
    )


def _gguf(metadata: GgufMetadata, shape: ModelShape) -> ModelShape:
    return replace(
        shape,
        norm="layer",
        norm_bias=True,
        activation="gelu_tanh",
        gated=False,
        mlp_bias=metadata.has("blk.0.ffn_up.bias"),
    )


FAMILIES = (Family("starcoder2", _DEFAULTS, _shape, layer=_LAYER, model=_MODEL, window="every_layer"),)
GGUF_FAMILIES = (GgufFamily("starcoder2", _gguf),)
