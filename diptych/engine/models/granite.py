"""Granite 3, dense, and Granite 4: Llama with scales of embeddings, scores, residual and logits.

Most layers of Granite 4's hybrids are Mamba-2, and some have experts beside the feed-forward of all tokens.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from diptych.engine.models.config_fields import llama_shape, unreadable
from diptych.engine.models.family import LLAMA_LAYER, Config, Family, GgufFamily, GgufMetadata, Names, Stored
from diptych.engine.models.llama import LLAMA_DEFAULTS
from diptych.engine.models.mamba2_fields import MAMBA2_DEFAULTS, mamba2_alone, mamba2_names
from diptych.engine.models.moe import with_experts
from diptych.engine.models.shape import ExpertsShape, ModelShape, UnsupportedModel

GRANITE_SCALES = {
    "embedding_multiplier": 1.0,
    "attention_multiplier": 1.0,
    "residual_multiplier": 1.0,
    "logits_scaling": 1.0,
}
_HYBRID = {
    **{field: value for field, value in LLAMA_DEFAULTS.items() if field != "mlp_bias"},
    **GRANITE_SCALES,
    **MAMBA2_DEFAULTS,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "shared_intermediate_size": 1024,
    "position_embedding_type": None,
}
_GATE_UP, _SHARED = ("gate", "up"), ("shared.gate", "shared.up")
_OF_EXPERTS = ("experts.{}.gate", "experts.{}.up")
GRANITE_EXPERTS: Names = {
    "router": "block_sparse_moe.router.layer.weight",
    "experts.*.gate": Stored("block_sparse_moe.input_linear.weight", _OF_EXPERTS, stacked=True),
    "experts.*.up": Stored("block_sparse_moe.input_linear.weight", _OF_EXPERTS, stacked=True),
    "experts.*.down": Stored("block_sparse_moe.output_linear.weight", stacked=True),
}
"""Places of Granite's experts."""
_HYBRID_LAYER: Names = {
    **LLAMA_LAYER,
    **GRANITE_EXPERTS,
    **mamba2_names("mamba."),
    **{field: Stored("shared_mlp.input_linear.weight", _GATE_UP) for field in _GATE_UP},
    "down": "shared_mlp.output_linear.weight",
    **{field: Stored("shared_mlp.input_linear.weight", _SHARED) for field in _SHARED},
    "shared.down": "shared_mlp.output_linear.weight",
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
    """Give the layers' kinds, which older files name differently, their usual names."""
    kinds = resolved["layer_types"]
    kinds = resolved.get("layers_block_type") if kinds is None else kinds
    if kinds is None:
        raise UnsupportedModel("layer_types: all layers are recurrent (linear_attention)")
    if not isinstance(kinds, list):
        raise unreadable(f"layers_block_type is {kinds!r}, not a list of layers")
    resolved["layer_types"] = ["linear_attention" if kind == "mamba" else kind for kind in kinds]


def _hybrid(config: Config, tied: bool) -> ModelShape:
    inner = config["shared_intermediate_size"]
    shape = granite_shape(config, tied, intermediate_size=inner)
    if config["position_embedding_type"] != "rope":
        shape = replace(shape, layers=tuple(replace(layer, rotation=None) for layer in shape.layers))
    if not config["num_local_experts"]:
        return shape
    return with_experts(shape, granite_experts(config, inner), [True] * shape.num_layers)


def granite_experts(config: Config, shared_size: int = 0) -> ExpertsShape:
    """Return the experts that a config describes, beside a feed-forward of `shared_size` of all tokens."""
    return ExpertsShape(
        num_experts=config["num_local_experts"],
        experts_per_token=config["num_experts_per_tok"],
        intermediate_size=config["intermediate_size"],
        routing="topk_then_softmax",
        shared_size=shared_size,
    )


FAMILIES = (
    Family("granite", {**LLAMA_DEFAULTS, **GRANITE_SCALES}, granite_shape),
    Family(
        "granitemoehybrid",
        _HYBRID,
        _hybrid,
        layer=_HYBRID_LAYER,
        resolve=_resolve_hybrid,
        layer_kinds={"linear_attention": mamba2_alone},
        neutral={"hidden_act": ("silu", "swish")},
    ),
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
