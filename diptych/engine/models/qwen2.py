"""Qwen2 and Qwen2.5: Llama with biases of queries, keys and values."""

from __future__ import annotations

from diptych.engine.models.config_fields import COMMON, llama_shape
from diptych.engine.models.family import Config, Family, GgufFamily
from diptych.engine.models.shape import ModelShape

QWEN2_DEFAULTS = {
    **COMMON,
    "vocab_size": 151936,
    "intermediate_size": 22016,
    "num_key_value_heads": 32,
    "max_position_embeddings": 32768,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
}


def _shape(config: Config, tied: bool) -> ModelShape:
    return llama_shape(config, tied, qkv_bias=True)


FAMILIES = (Family("qwen2", QWEN2_DEFAULTS, _shape, window="layer_types"),)
GGUF_FAMILIES = (GgufFamily("qwen2"),)
