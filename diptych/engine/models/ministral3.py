"""Ministral 3, and the text model of Mistral Small 4 and later: queries grow with their position."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from diptych.engine.models.config_fields import llama_shape
from diptych.engine.models.family import Config, Family, GgufFamily, GgufMetadata
from diptych.engine.models.rope import yarn_magnitude
from diptych.engine.models.shape import ModelShape, QueryGrowth, Rotation, UnsupportedModel

_DEFAULTS = {
    "vocab_size": 131072,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 34,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "hidden_act": "silu",
    "max_position_embeddings": 262144,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "sliding_window": None,
    "eos_token_id": 2,
}
_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 1_000_000.0,
    "factor": 16.0,
    "original_max_position_embeddings": 16384,
    "mscale_all_dim": 1.0,
    "mscale": 1.0,
    "llama_4_scaling_beta": 0.1,
}


def _resolve(resolved: dict[str, Any]) -> None:
    if resolved.get("rope_parameters") is None and resolved.get("rope_scaling") is None:
        resolved["rope_parameters"] = _ROPE


def _shape(config: Config, tied: bool) -> ModelShape:
    rope = config["rope_parameters"]
    beta, length = rope.get("llama_4_scaling_beta"), rope["original_max_position_embeddings"]
    if not isinstance(beta, float | int) or not isinstance(length, int):
        raise UnsupportedModel("rope_parameters lack llama_4_scaling_beta")
    return llama_shape(config, tied, query_growth=QueryGrowth(float(beta), length))


FAMILIES = (Family("ministral3", _DEFAULTS, _shape, window="every_layer", resolve=_resolve),)


def _gguf(metadata: GgufMetadata, shape: ModelShape) -> ModelShape:
    shape = replace(shape, rotations=tuple(_sharpened(metadata, one) for one in shape.rotations))
    beta = metadata.number("attention.temperature_scale")
    length = metadata.integer("rope.scaling.original_context_length")
    if not beta or not length:
        return shape
    return replace(shape, query_growth=QueryGrowth(beta, length))


def _sharpened(metadata: GgufMetadata, rotation: Rotation) -> Rotation:
    """Return the rotation with the magnitude that the file says as transformers' `mscale_all_dim`, beside an
    `mscale` of one.
    """
    all_dims, scaling = metadata.number("rope.scaling.yarn_log_multiplier"), rotation.scaling
    if not all_dims or scaling is None or scaling.kind != "yarn":
        return rotation
    magnitude = yarn_magnitude(scaling.factor) / yarn_magnitude(scaling.factor, all_dims)
    return replace(rotation, scaling=replace(scaling, attention_factor=magnitude))


_READ = frozenset({"attention.temperature_scale", "rope.scaling.yarn_log_multiplier"})
GGUF_FAMILIES = (GgufFamily("mistral3", _gguf, interleaved=True, read=_READ),)
