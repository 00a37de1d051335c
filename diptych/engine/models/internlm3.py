"""InternLM 3: Llama, with names of its own for biases."""

from __future__ import annotations

from typing import Any

from diptych.engine.models.config_fields import COMMON, llama_shape, unreadable
from diptych.engine.models.family import Family

_DEFAULTS = {
    **COMMON,
    "vocab_size": 128512,
    "intermediate_size": 10240,
    "num_hidden_layers": 48,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-5,
    "eos_token_id": 2,
}


def _resolve(resolved: dict[str, Any]) -> None:
    for ours, theirs in (("attention_bias", "qkv_bias"), ("mlp_bias", "bias")):
        value = resolved.pop(theirs, None)
        if value is not None and not isinstance(value, bool):
            raise unreadable(f"{theirs} is {value!r}, not of type bool")
        resolved[ours] = resolved[ours] if value is None else value
    for field in ("rope_scaling", "rope_parameters"):
        rope = resolved.get(field)
        # "dynamic" stretches nothing up to max_position_embeddings, and no more is served.
        if isinstance(rope, dict) and rope.get("rope_type", rope.get("type")) == "dynamic":
            kept = {name: value for name, value in rope.items() if name == "rope_theta"}
            resolved[field] = {**kept, "rope_type": "default"}


FAMILIES = (Family("internlm3", _DEFAULTS, llama_shape, hidden_is_whole_heads=True, resolve=_resolve),)
