"""Llama: the family whose fields and tensor names most others share."""

from __future__ import annotations

from types import MappingProxyType

from diptych.engine.models.config_fields import COMMON, llama_shape
from diptych.engine.models.family import GGUF_LAYER, Family, GgufFamily, GgufMetadata
from diptych.engine.models.moe import EXPERT_KEYS, GGUF_EXPERTS, gguf_experts
from diptych.engine.models.shape import ModelShape

LLAMA_DEFAULTS = {
    **COMMON,
    "vocab_size": 32000,
    "intermediate_size": 11008,
    "num_key_value_heads": None,
    "max_position_embeddings": 2048,
    "eos_token_id": 2,
}
FAMILIES = (Family("llama", LLAMA_DEFAULTS, llama_shape, hidden_is_whole_heads=True),)


def _gguf(metadata: GgufMetadata, shape: ModelShape) -> ModelShape:
    """Return the shape of a file, which may be of Mixtral: llama.cpp gives it Llama's architecture."""
    return gguf_experts(metadata, shape, normalise=True) if metadata.integer("expert_count") else shape


GGUF_FAMILIES = (
    GgufFamily(
        "llama",
        _gguf,
        layer=MappingProxyType({**GGUF_LAYER, **GGUF_EXPERTS}),
        interleaved=True,
        read=EXPERT_KEYS,
    ),
)
