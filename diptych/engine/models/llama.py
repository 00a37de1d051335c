"""Llama: the family whose fields and tensor names most others share."""

from __future__ import annotations

from diptych.engine.models.config_fields import COMMON, llama_shape
from diptych.engine.models.family import Family, GgufFamily

LLAMA_DEFAULTS = {
    **COMMON,
    "vocab_size": 32000,
    "intermediate_size": 11008,
    "num_key_value_heads": None,
    "max_position_embeddings": 2048,
    "eos_token_id": 2,
}
FAMILIES = (Family("llama", LLAMA_DEFAULTS, llama_shape, hidden_is_whole_heads=True),)
GGUF_FAMILIES = (GgufFamily("llama", interleaved=True),)
