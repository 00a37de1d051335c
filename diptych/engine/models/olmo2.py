"""OLMo 2 and 3: norms after each sublayer, and over the whole width of queries and keys.

OLMo 3 has windows by layer, whose rotation is not stretched.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from diptych.engine.models.config_fields import every_full, llama_shape
from diptych.engine.models.family import (
    LLAMA_ATTENTION,
    LLAMA_FEED_FORWARD,
    Config,
    Family,
    GgufFamily,
    GgufMetadata,
    Names,
)
from diptych.engine.models.shape import LayerShape, ModelShape

_DEFAULTS = {
    "vocab_size": 50304,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": None,
    "head_dim": None,
    "hidden_act": "silu",
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "eos_token_id": 50279,
}
_LAYER: Names = {
    **LLAMA_ATTENTION,
    **LLAMA_FEED_FORWARD,
    "attention_out_norm": "post_attention_layernorm.weight",
    "feed_forward_out_norm": "post_feedforward_layernorm.weight",
}
_FULL, _SLIDING = "full_attention", "sliding_attention"
_THETA3 = 500_000.0
_EVERY = 4
"""Every so many-th layer has full attention where the file does not say which."""


def _shape(config: Config, tied: bool) -> ModelShape:
    return llama_shape(config, tied, norms="after", qk_norm="width")


def _resolve3(resolved: dict[str, Any]) -> None:
    if resolved["layer_types"] is None:
        resolved["layer_types"] = every_full(resolved, _EVERY)


def _rope3(config: Config) -> Mapping[str, Mapping[str, Any]]:
    """Return both tables; a theta beside them is that of full attention alone, as transformers reads it."""
    given = config.get("rope_parameters") or {}
    full = {**(given.get(_FULL) or {}), **(config.get("rope_scaling") or {})}
    sliding = dict(given.get(_SLIDING) or {})
    beside = "rope_theta" not in full and "rope_theta" in config
    full.setdefault("rope_theta", config.get("rope_theta", _THETA3))
    sliding.setdefault("rope_theta", _THETA3 if beside else config.get("rope_theta", _THETA3))
    return {_FULL: full, _SLIDING: sliding}


FAMILIES = (
    Family("olmo2", _DEFAULTS, _shape, layer=_LAYER),
    Family(
        "olmo3",
        {**_DEFAULTS, "sliding_window": 4096, "layer_types": None},
        _shape,
        layer=_LAYER,
        rope_theta=_THETA3,
        window="layer_types",
        resolve=_resolve3,
        rope_by_layer_type=_rope3,
    ),
)


def _gguf(metadata: GgufMetadata, shape: ModelShape) -> ModelShape:
    """Return OLMo 2's shape, or that of OLMo 3, which is written under the same name, with a window."""
    after = replace(shape, norms="after", qk_norm="width")
    window = metadata.integer("attention.sliding_window") or None
    if window is None:
        return after
    [full] = shape.rotations
    return replace(
        after,
        rotations=(full, replace(full, scaling=None)),
        layers=tuple(
            LayerShape(window, 1) if number % _EVERY else LayerShape()
            for number in range(1, shape.num_layers + 1)
        ),
    )


GGUF_FAMILIES = (GgufFamily("olmo2", _gguf),)
