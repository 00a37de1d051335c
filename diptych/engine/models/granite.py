"""Granite 3 and 4, dense: Llama with scales of embeddings, scores, residual and logits.

Granite 4's dense models are of a hybrid's type whose layers are all attention; one with recurrent layers is
refused by its `layer_types`, one with experts by `num_local_experts`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from diptych.engine.models.config_fields import llama_shape
from diptych.engine.models.family import LLAMA_LAYER, Config, Family, GgufFamily, GgufMetadata, Names, Stored
from diptych.engine.models.llama import LLAMA_DEFAULTS
from diptych.engine.models.shape import LayerShape, ModelShape, UnsupportedModel

GRANITE_SCALES = {
    "embedding_multiplier": 1.0,
    "attention_multiplier": 1.0,
    "residual_multiplier": 1.0,
    "logits_scaling": 1.0,
}
_HYBRID = {
    **{field: value for field, value in LLAMA_DEFAULTS.items() if field != "mlp_bias"},
    **GRANITE_SCALES,
    "num_local_experts": 8,
    "shared_intermediate_size": 1024,
    "position_embedding_type": None,
}
_GATE_UP = ("gate", "up")
_HYBRID_LAYER: Names = {
    **LLAMA_LAYER,
    **{field: Stored("shared_mlp.input_linear.weight", _GATE_UP) for field in _GATE_UP},
    "down": "shared_mlp.output_linear.weight",
}


def granite_shape(config: Config, tied: bool, **switches: Any) -> ModelShape:
    """Return the shape that the fields of Llama and Granite's scales describe."""
    return llama_shape(
        config,
        tied,
        attention_scale=float(config["attention_multiplier"]),
        embedding_scale=float(config["embedding_multiplier"]),
        residual_scale=float(config["residual_multiplier"]),
        logit_scale=1.0 / float(config["logits_scaling"]),
        **switches,
    )


def _resolve_hybrid(resolved: dict[str, Any]) -> None:
    if resolved["layer_types"] is None:
        raise UnsupportedModel("layer_types: all layers are recurrent (linear_attention)")
    if resolved["num_local_experts"]:
        raise UnsupportedModel(f"num_local_experts {resolved['num_local_experts']}: experts are not computed")


def _hybrid(config: Config, tied: bool) -> ModelShape:
    shape = granite_shape(config, tied, intermediate_size=config["shared_intermediate_size"])
    if config["position_embedding_type"] == "rope":
        return shape
    return replace(shape, layers=(LayerShape(rotation=None),) * shape.num_layers)


FAMILIES = (
    Family("granite", {**LLAMA_DEFAULTS, **GRANITE_SCALES}, granite_shape),
    Family("granitemoehybrid", _HYBRID, _hybrid, layer=_HYBRID_LAYER, resolve=_resolve_hybrid),
)


def granite_gguf(metadata: GgufMetadata, shape: ModelShape) -> ModelShape:
    """Return `shape` with Granite's scales of a GGUF file."""
    return replace(
        shape,
        attention_scale=metadata.number("attention.scale") or None,
        embedding_scale=metadata.number("embedding_scale") or 1.0,
        residual_scale=metadata.number("residual_scale") or 1.0,
        logit_scale=1.0 / (metadata.number("logit_scale") or 1.0),
    )


GRANITE_KEYS = frozenset({"attention.scale", "embedding_scale", "residual_scale", "logit_scale"})
GGUF_FAMILIES = (GgufFamily("granite", granite_gguf, interleaved=True, read=GRANITE_KEYS),)
