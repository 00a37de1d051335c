"""Granite-MoE: Granite's scales, and experts whose weights are the softmax of the chosen logits."""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType

from diptych.engine.models.config_fields import COMMON, llama_shape, unreadable
from diptych.engine.models.family import (
    GGUF_LAYER,
    LLAMA_ATTENTION,
    LLAMA_NORMS,
    Config,
    Family,
    GgufFamily,
    GgufMetadata,
    Stored,
)
from diptych.engine.models.moe import EXPERT_KEYS, GGUF_EXPERTS, gguf_experts, with_experts
from diptych.engine.models.shape import ExpertsShape, ModelShape

_DEFAULTS = {
    **COMMON,
    "vocab_size": 32000,
    "intermediate_size": 11008,
    "num_key_value_heads": None,
    "max_position_embeddings": 2048,
    "eos_token_id": 2,
    "embedding_multiplier": 1.0,
    "logits_scaling": 1.0,
    "residual_multiplier": 1.0,
    "attention_multiplier": 1.0,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
}
_GATE_UP = ("experts.{}.gate", "experts.{}.up")
_LAYER = MappingProxyType(
    {
        **LLAMA_NORMS,
        **LLAMA_ATTENTION,
        "router": "block_sparse_moe.router.layer.weight",
        "experts.*.gate": Stored("block_sparse_moe.input_linear.weight", _GATE_UP, stacked=True),
        "experts.*.up": Stored("block_sparse_moe.input_linear.weight", _GATE_UP, stacked=True),
        "experts.*.down": Stored("block_sparse_moe.output_linear.weight", stacked=True),
    }
)


def _shape(config: Config, tied: bool) -> ModelShape:
    if not config["logits_scaling"]:
        raise unreadable("logits_scaling is 0")
    experts = ExpertsShape(
        num_experts=config["num_local_experts"],
        experts_per_token=config["num_experts_per_tok"],
        intermediate_size=config["intermediate_size"],
        routing="topk_then_softmax",
    )
    shape = llama_shape(
        config,
        tied,
        attention_scale=config["attention_multiplier"],
        embedding_scale=config["embedding_multiplier"],
        residual_scale=config["residual_multiplier"],
        logit_scale=1.0 / config["logits_scaling"],
    )
    return with_experts(shape, experts, [True] * shape.num_layers)


def _gguf(metadata: GgufMetadata, shape: ModelShape) -> ModelShape:
    scaled = replace(
        shape,
        attention_scale=metadata.number("attention.scale") or None,
        embedding_scale=metadata.number("embedding_scale") or 1.0,
        residual_scale=metadata.number("residual_scale") or 1.0,
        logit_scale=1.0 / (metadata.number("logit_scale") or 1.0),
    )
    return gguf_experts(metadata, scaled, routing="topk_then_softmax")


FAMILIES = (Family("granitemoe", _DEFAULTS, _shape, layer=_LAYER),)
GGUF_FAMILIES = (
    GgufFamily(
        "granitemoe",
        _gguf,
        layer=MappingProxyType({**GGUF_LAYER, **GGUF_EXPERTS}),
        interleaved=True,
        read=EXPERT_KEYS | {"attention.scale", "embedding_scale", "residual_scale", "logit_scale"},
    ),
)
