"""Gemma, Gemma 2 and the text model of Gemma 3: norms stored less one, scaled embeddings, a GELU gate.

Gemma 2 and 3 normalise around each sublayer and have windows by layer; Gemma 2 caps scores and logits,
Gemma 3 normalises queries and keys and rotates its windowed layers by another table.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from diptych.engine.models.config_fields import activation, every_full, llama_shape
from diptych.engine.models.family import (
    GGUF_LAYER,
    GGUF_MODEL,
    LLAMA_ATTENTION,
    LLAMA_FEED_FORWARD,
    LLAMA_MODEL,
    Config,
    Family,
    GgufFamily,
    GgufMetadata,
    Names,
    Stored,
)
from diptych.engine.models.shape import LayerShape, ModelShape, Rotation

_DEFAULTS = {
    "vocab_size": 256000,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "head_dim": 256,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "attention_bias": False,
    "eos_token_id": 1,
}
_GEMMA = {
    **_DEFAULTS,
    "hidden_size": 3072,
    "intermediate_size": 24576,
    "num_hidden_layers": 28,
    "hidden_act": "gelu_pytorch_tanh",
}
_GEMMA2 = {
    **_DEFAULTS,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "hidden_activation": "gelu_pytorch_tanh",
    "sliding_window": 4096,
    "layer_types": None,
    "query_pre_attn_scalar": 256,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
}
_GEMMA3 = {
    **_GEMMA2,
    "vocab_size": 262208,
    "max_position_embeddings": 131072,
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
}
_FULL, _SLIDING = "full_attention", "sliding_attention"
_THETA, _THETA_OF_WINDOWS = 1_000_000.0, 10_000.0
_NEUTRAL = {"use_bidirectional_attention": (None, False)}


def _less_one(name: str) -> Stored:
    return Stored(name, plus=1.0)


_MODEL: Names = {**LLAMA_MODEL, "final_norm": _less_one("model.norm.weight")}
_QK_NORMS: Names = {
    "q_norm": _less_one("self_attn.q_norm.weight"),
    "k_norm": _less_one("self_attn.k_norm.weight"),
}
_BEFORE: Names = {
    **LLAMA_ATTENTION,
    **LLAMA_FEED_FORWARD,
    "input_norm": _less_one("input_layernorm.weight"),
    "post_norm": _less_one("post_attention_layernorm.weight"),
}
_AROUND: Names = {
    **LLAMA_ATTENTION,
    **LLAMA_FEED_FORWARD,
    **_QK_NORMS,
    "input_norm": _less_one("input_layernorm.weight"),
    "attention_out_norm": _less_one("post_attention_layernorm.weight"),
    "post_norm": _less_one("pre_feedforward_layernorm.weight"),
    "feed_forward_out_norm": _less_one("post_feedforward_layernorm.weight"),
}


def _shape(config: Config, tied: bool) -> ModelShape:
    return llama_shape(config, tied, embedding_scale=config["hidden_size"] ** 0.5)


def _around(config: Config, tied: bool, **switches: Any) -> ModelShape:
    return llama_shape(
        config,
        tied,
        embedding_scale=config["hidden_size"] ** 0.5,
        attention_scale=config["query_pre_attn_scalar"] ** -0.5,
        score_cap=config["attn_logit_softcapping"],
        logit_cap=config["final_logit_softcapping"],
        activation=activation(config, "hidden_activation"),
        norms="around",
        **switches,
    )


def _shape3(config: Config, tied: bool) -> ModelShape:
    return _around(config, tied, qk_norm="head")


def _every(step: int) -> Callable[[dict[str, Any]], None]:
    """Return what gives every `step`-th layer full attention, where the config does not say which."""

    def resolve(resolved: dict[str, Any]) -> None:
        if resolved["layer_types"] is None:
            resolved["layer_types"] = every_full(resolved, step)

    return resolve


def _rope3(config: Config) -> Mapping[str, Mapping[str, Any]]:
    given = config.get("rope_parameters") or {}
    full = {**(given.get(_FULL) or {}), **(config.get("rope_scaling") or {})}
    sliding = dict(given.get(_SLIDING) or {})
    full.setdefault("rope_theta", config.get("rope_theta", _THETA))
    sliding.setdefault("rope_theta", config.get("rope_local_base_freq", _THETA_OF_WINDOWS))
    return {_FULL: full, _SLIDING: sliding}


FAMILIES = (
    Family("gemma", _GEMMA, _shape, layer=_BEFORE, model=_MODEL, neutral=_NEUTRAL),
    Family(
        "gemma2",
        _GEMMA2,
        _around,
        layer=_AROUND,
        model=_MODEL,
        window="layer_types",
        resolve=_every(2),
        neutral=_NEUTRAL,
    ),
    Family(
        "gemma3_text",
        _GEMMA3,
        _shape3,
        layer=_AROUND,
        model=_MODEL,
        window="layer_types",
        resolve=_every(6),
        neutral=_NEUTRAL,
        rope_by_layer_type=_rope3,
    ),
)

_NORMS = ("input_norm", "post_norm", "attention_out_norm", "feed_forward_out_norm", "q_norm", "k_norm")
_GGUF_LAYER: Names = {
    **GGUF_LAYER,
    **{field: Stored(str(GGUF_LAYER[field]), float32=True) for field in _NORMS},
}
_GGUF_MODEL: Names = {**GGUF_MODEL, "final_norm": Stored("output_norm.weight", float32=True)}


def _gguf(metadata: GgufMetadata, shape: ModelShape) -> ModelShape:
    return replace(shape, embedding_scale=shape.hidden_size**0.5, activation="gelu_tanh")


def _gguf2(metadata: GgufMetadata, shape: ModelShape) -> ModelShape:
    wide = shape.hidden_size // shape.num_heads  # of the model with 46 layers, the 27B
    return replace(
        _gguf(metadata, shape),
        norms="around",
        score_cap=metadata.number("attn_logit_softcapping"),
        logit_cap=metadata.number("final_logit_softcapping"),
        attention_scale=wide**-0.5 if shape.num_layers == 46 else None,
        layers=_windows(metadata, shape, pattern=2),
    )


def _gguf3(metadata: GgufMetadata, shape: ModelShape) -> ModelShape:
    wide = shape.hidden_size // shape.num_heads  # of the model with 62 layers, the 27B
    [full] = shape.rotations
    theta = metadata.number("rope.freq_base_swa") or _THETA_OF_WINDOWS
    return replace(
        _gguf(metadata, shape),
        norms="around",
        logit_cap=metadata.number("final_logit_softcapping"),
        attention_scale=wide**-0.5 if shape.num_layers == 62 else None,
        layers=_windows(metadata, shape, pattern=6, rotation_of_windows=1),
        rotations=(
            replace(full, theta=metadata.number("rope.freq_base") or _THETA),
            Rotation(theta, full.width),
        ),
    )


def _windows(
    metadata: GgufMetadata, shape: ModelShape, *, pattern: int, rotation_of_windows: int = 0
) -> tuple[LayerShape, ...]:
    window = metadata.integer("attention.sliding_window") or None
    windowed = LayerShape(window, rotation_of_windows)
    return tuple(windowed if number % pattern else LayerShape() for number in range(1, shape.num_layers + 1))


_CAPS = frozenset({"attn_logit_softcapping", "final_logit_softcapping"})
GGUF_FAMILIES = (
    GgufFamily("gemma", _gguf, layer=_GGUF_LAYER, model=_GGUF_MODEL),
    GgufFamily("gemma2", _gguf2, layer=_GGUF_LAYER, model=_GGUF_MODEL, read=_CAPS),
    GgufFamily("gemma3", _gguf3, layer=_GGUF_LAYER, model=_GGUF_MODEL, read=_CAPS | {"rope.freq_base_swa"}),
)
