"""Helium: Llama with pairs of neighbours rotated."""

from __future__ import annotations

from diptych.engine.models.config_fields import COMMON, llama_shape
from diptych.engine.models.family import Config, Family
from diptych.engine.models.shape import ModelShape

_DEFAULTS = {
    **COMMON,
    "vocab_size": 48000,
    "hidden_size": 2560,
    "intermediate_size": 7040,
    "num_hidden_layers": 24,
    "num_attention_heads": 20,
    "num_key_value_heads": 20,
    "head_dim": 128,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-8,
    "eos_token_id": 2,
}


def _shape(config: Config, tied: bool) -> ModelShape:
    return llama_shape(config, tied, output_bias=False)


FAMILIES = (Family("helium", _DEFAULTS, _shape, interleaved=True, rope_theta=100_000.0),)
