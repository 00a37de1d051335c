"""Seed-OSS: Llama with biases of queries, keys and values."""

from __future__ import annotations

from diptych.engine.models.config_fields import COMMON, llama_shape
from diptych.engine.models.family import GGUF_LAYER, Config, Family, GgufFamily, Names
from diptych.engine.models.shape import ModelShape

_DEFAULTS = {
    **COMMON,
    "vocab_size": 155136,
    "intermediate_size": 27648,
    "num_hidden_layers": 64,
    "num_attention_heads": 80,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 524288,
    "attention_bias": True,
    "attention_out_bias": False,
    "eos_token_id": 2,
}
_GGUF_LAYER: Names = {**GGUF_LAYER, "post_norm": "post_attention_norm.weight"}


def _shape(config: Config, tied: bool) -> ModelShape:
    return llama_shape(config, tied, output_bias=config["attention_out_bias"])


FAMILIES = (Family("seed_oss", _DEFAULTS, _shape),)
GGUF_FAMILIES = (GgufFamily("seed_oss", layer=_GGUF_LAYER),)
