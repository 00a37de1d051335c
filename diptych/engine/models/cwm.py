"""CWM (Code World Model): Llama with windows by layer."""

from __future__ import annotations

from typing import Any

from diptych.engine.models.config_fields import COMMON, llama_shape
from diptych.engine.models.family import Family

_DEFAULTS = {
    **{field: value for field, value in COMMON.items() if field != "attention_bias"},
    "vocab_size": 128256,
    "hidden_size": 6144,
    "intermediate_size": 21504,
    "num_hidden_layers": 64,
    "num_attention_heads": 48,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "sliding_window": 8192,
}
_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 1_000_000.0,
    "factor": 16.0,
    "high_freq_factor": 4.0,
    "low_freq_factor": 1.0,
    "original_max_position_embeddings": 8192,
}
_EVERY = 4
_ENDS = [128001, 128008, 128009]


def _resolve(resolved: dict[str, Any]) -> None:
    if resolved.get("rope_parameters") is None and resolved.get("rope_scaling") is None:
        resolved["rope_parameters"] = _ROPE
    if resolved["layer_types"] is None:
        kinds = ("full_attention", *["sliding_attention"] * (_EVERY - 1))
        layers = range(resolved["num_hidden_layers"])
        resolved["layer_types"] = [kinds[number % _EVERY] for number in layers]
    if resolved["eos_token_id"] is None:
        resolved["eos_token_id"] = _ENDS


FAMILIES = (
    Family("cwm", _DEFAULTS, llama_shape, rope_theta=1_000_000.0, window="layer_types", resolve=_resolve),
)
