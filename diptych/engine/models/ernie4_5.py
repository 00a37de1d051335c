"""ERNIE 4.5, dense: Llama with pairs of neighbours rotated."""

from __future__ import annotations

from diptych.engine.models.config_fields import llama_shape
from diptych.engine.models.family import Config, Family, GgufFamily
from diptych.engine.models.shape import ModelShape

_DEFAULTS = {
    "vocab_size": 103424,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 18,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "hidden_act": "silu",
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "use_bias": False,
    "eos_token_id": 2,
}


def _shape(config: Config, tied: bool) -> ModelShape:
    bias = config["use_bias"]
    return llama_shape(config, tied, qkv_bias=bias, output_bias=bias, mlp_bias=bias)


FAMILIES = (Family("ernie4_5", _DEFAULTS, _shape, interleaved=True, rope_theta=500_000.0),)
GGUF_FAMILIES = (GgufFamily("ernie4_5", interleaved=True),)
