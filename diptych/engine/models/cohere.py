"""Cohere (Command R) and Cohere 2 (Command R7B, Command A): one LayerNorm for attention and feed-forward.

Rotation pairs neighbours; Cohere 2 rotates its windowed layers only. Cohere's norms of queries and keys
(Command R+) are LayerNorms a head and refused.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from diptych.engine.models.config_fields import every_full, llama_shape
from diptych.engine.models.family import LLAMA_LAYER, Config, Family, GgufFamily, GgufMetadata
from diptych.engine.models.shape import LayerShape, ModelShape

_DEFAULTS = {
    "vocab_size": 256000,
    "hidden_size": 8192,
    "intermediate_size": 22528,
    "logit_scale": 0.0625,
    "num_hidden_layers": 40,
    "num_attention_heads": 64,
    "num_key_value_heads": None,
    "head_dim": None,
    "hidden_act": "silu",
    "max_position_embeddings": 8192,
    "layer_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "attention_bias": False,
    "eos_token_id": 255001,
}
_DEFAULTS2 = {**_DEFAULTS, "sliding_window": 4096, "layer_types": None}
_LAYER = {field: name for field, name in LLAMA_LAYER.items() if field != "post_norm"}
_SLIDING = "sliding_attention"
_EVERY = 4


def _shape(config: Config, tied: bool) -> ModelShape:
    return llama_shape(
        config,
        tied,
        rms_eps=config["layer_norm_eps"],
        norm="layer",
        parallel_residual=True,
        logit_scale=float(config["logit_scale"]),
    )


def _shape2(config: Config, tied: bool) -> ModelShape:
    shape, window = _shape(config, tied), config["sliding_window"]
    windowed = [window is not None and kind == _SLIDING for kind in config["layer_types"]]
    return _hybrid(shape, windowed, window)


def _hybrid(shape: ModelShape, windowed: list[bool], window: int | None) -> ModelShape:
    layers = (LayerShape(window) if narrow else LayerShape(rotation=None) for narrow in windowed)
    return replace(shape, layers=tuple(layers))


def _resolve2(resolved: dict[str, Any]) -> None:
    resolved["head_dim"] = None  # transformers ignores the file's
    if resolved["layer_types"] is None:
        resolved["layer_types"] = every_full(resolved, _EVERY)


FAMILIES = (
    Family(
        "cohere",
        _DEFAULTS,
        _shape,
        layer=_LAYER,
        interleaved=True,
        rope_theta=500_000.0,
        neutral={"use_qk_norm": (None, False)},
    ),
    Family(
        "cohere2",
        _DEFAULTS2,
        _shape2,
        layer=_LAYER,
        interleaved=True,
        window="layer_types",
        resolve=_resolve2,
    ),
)


def _gguf(metadata: GgufMetadata, shape: ModelShape) -> ModelShape:
    scale = metadata.number("logit_scale") or 1.0
    return replace(shape, norm="layer", parallel_residual=True, logit_scale=scale)


def _gguf2(metadata: GgufMetadata, shape: ModelShape) -> ModelShape:
    windowed = [number % _EVERY != 0 for number in range(1, shape.num_layers + 1)]
    window = metadata.integer("attention.sliding_window")
    return _hybrid(_gguf(metadata, shape), windowed, window)


GGUF_FAMILIES = (
    GgufFamily("command-r", _gguf, interleaved=True, read=frozenset({"logit_scale"})),
    GgufFamily("cohere2", _gguf2, interleaved=True, read=frozenset({"logit_scale"})),
)
