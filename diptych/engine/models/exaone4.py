"""EXAONE 4: norms after each sublayer and of each head; layers with windows, and layers without rotation."""

from __future__ import annotations

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
    "vocab_size": 102400,
    "hidden_size": 4096,
    "intermediate_size": 16384,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "head_dim": None,
    "hidden_act": "silu",
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "sliding_window": 4096,
    "layer_types": None,
    "eos_token_id": 2,
}
_LAYER: Names = {
    **LLAMA_ATTENTION,
    **LLAMA_FEED_FORWARD,
    "attention_out_norm": "post_attention_layernorm.weight",
    "feed_forward_out_norm": "post_feedforward_layernorm.weight",
}
_FULL, _SLIDING = "full_attention", "sliding_attention"
_EVERY = 4


def _resolve(resolved: dict[str, Any]) -> None:
    if resolved["layer_types"] is not None:
        return
    count, pattern = resolved["num_hidden_layers"], resolved.get("sliding_window_pattern")
    if resolved["sliding_window"] is None:
        resolved["layer_types"] = [_FULL] * count
    elif isinstance(pattern, str) and pattern and not set(pattern) - {"L", "G"}:
        kinds = [_SLIDING if pattern[number % len(pattern)] == "L" else _FULL for number in range(count)]
        resolved["layer_types"] = [*kinds[:-1], _FULL]
    else:
        resolved["layer_types"] = every_full(resolved, _EVERY)


def _shape(config: Config, tied: bool) -> ModelShape:
    shape = llama_shape(config, tied, norms="after", qk_norm="head")
    if config["sliding_window"] is None:
        return shape
    return _hybrid(shape, [kind == _SLIDING for kind in config["layer_types"]], config["sliding_window"])


def _hybrid(shape: ModelShape, windowed: list[bool], window: int) -> ModelShape:
    """Return the shape with windows of rotated layers; layers that see everything are not rotated."""
    layers = (LayerShape(window) if narrow else LayerShape(rotation=None) for narrow in windowed)
    return replace(shape, layers=tuple(layers))


def _gguf(metadata: GgufMetadata, shape: ModelShape) -> ModelShape:
    after = replace(shape, norms="after", qk_norm="head")
    window = metadata.integer("attention.sliding_window")
    if not window:
        return after
    return _hybrid(after, [number % _EVERY != 0 for number in range(1, shape.num_layers + 1)], window)


FAMILIES = (Family("exaone4", _DEFAULTS, _shape, layer=_LAYER, window="layer_types", resolve=_resolve),)
GGUF_FAMILIES = (GgufFamily("exaone4", _gguf),)
