"""Mistral, with one window for all layers, and Ministral, with windows by layer."""

from __future__ import annotations

from diptych.engine.models.config_fields import COMMON, llama_shape
from diptych.engine.models.family import Family, GgufFamily

MISTRAL_DEFAULTS = {
    **COMMON,
    "vocab_size": 32000,
    "intermediate_size": 14336,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "eos_token_id": 2,
    "sliding_window": 4096,
}
FAMILIES = (
    Family("mistral", MISTRAL_DEFAULTS, llama_shape, window="every_layer"),
    Family("ministral", MISTRAL_DEFAULTS, llama_shape, window="layer_types"),
)
GGUF_FAMILIES = (GgufFamily("mistral", interleaved=True),)
