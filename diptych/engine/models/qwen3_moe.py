"""Qwen3-MoE (Qwen3 with experts) and Qwen2-MoE, which has a shared expert behind a gate besides."""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType
from typing import Any

from diptych.engine.models.config_fields import llama_shape, unreadable
from diptych.engine.models.family import (
    GGUF_LAYER,
    LLAMA_LAYER,
    Config,
    Family,
    GgufFamily,
    GgufMetadata,
    Names,
)
from diptych.engine.models.moe import EXPERT_KEYS, EXPERT_MATRICES, GGUF_EXPERTS, gguf_experts, with_experts
from diptych.engine.models.qwen2 import QWEN2_DEFAULTS
from diptych.engine.models.shape import ExpertsShape, ModelShape

_DEFAULTS = {
    **QWEN2_DEFAULTS,
    "hidden_size": 2048,
    "num_hidden_layers": 24,
    "decoder_sparse_step": 1,
    "norm_topk_prob": False,
    "mlp_only_layers": None,
}
_QWEN3 = {
    **{field: value for field, value in _DEFAULTS.items() if field != "max_window_layers"},
    "intermediate_size": 6144,
    "num_key_value_heads": 4,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
}
_QWEN2 = {
    **_DEFAULTS,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "intermediate_size": 5632,
    "moe_intermediate_size": 1408,
    "shared_expert_intermediate_size": 5632,
    "num_experts": 60,
    "num_experts_per_tok": 4,
    "qkv_bias": True,
}
_LAYER = MappingProxyType({**LLAMA_LAYER, **EXPERT_MATRICES})
QWEN2_EXPERTS: Names = MappingProxyType(
    {
        **EXPERT_MATRICES,
        "shared.gate": "mlp.shared_expert.gate_proj.weight",
        "shared.up": "mlp.shared_expert.up_proj.weight",
        "shared.down": "mlp.shared_expert.down_proj.weight",
        "shared_router": "mlp.shared_expert_gate.weight",
    }
)
"""Places of experts of which one behind a gate is every token's."""
_QWEN2_LAYER = MappingProxyType({**LLAMA_LAYER, **QWEN2_EXPERTS})
_GGUF_LAYER = MappingProxyType({**GGUF_LAYER, **GGUF_EXPERTS})


def _resolve(config: dict[str, Any]) -> None:
    # transformers 5 writes another name.
    config["num_experts"] = config.get("num_local_experts", config["num_experts"])


def _qwen3(config: Config, tied: bool) -> ModelShape:
    return _with_experts(config, llama_shape(config, tied, qk_norm="head"), _experts(config))


def _qwen2(config: Config, tied: bool) -> ModelShape:
    return qwen_experts(config, llama_shape(config, tied, qkv_bias=config["qkv_bias"], output_bias=False))


def qwen_experts(config: Config, shape: ModelShape) -> ModelShape:
    """Return `shape` with the experts that a config of Qwen2-MoE and its relatives describes.

    Raises UnsupportedModel, naming the field.
    """
    experts = replace(
        _experts(config), shared_size=config["shared_expert_intermediate_size"], shared_gate=True
    )
    return _with_experts(config, shape, experts)


def _experts(config: Config) -> ExpertsShape:
    return ExpertsShape(
        num_experts=config["num_experts"],
        experts_per_token=config["num_experts_per_tok"],
        intermediate_size=config["moe_intermediate_size"],
        normalise=config["norm_topk_prob"],
    )


def _with_experts(config: Config, shape: ModelShape, experts: ExpertsShape) -> ModelShape:
    step, dense = config["decoder_sparse_step"], config["mlp_only_layers"] or []
    if step < 1:
        raise unreadable(f"decoder_sparse_step is {step}")
    if not isinstance(dense, list) or not all(isinstance(layer, int) for layer in dense):
        raise unreadable(f"mlp_only_layers is {dense!r}, not a list of layers")
    marks = (layer not in dense and (layer + 1) % step == 0 for layer in range(shape.num_layers))
    return with_experts(shape, experts, marks)


def _qwen3_gguf(metadata: GgufMetadata, shape: ModelShape) -> ModelShape:
    # llama.cpp normalises the weights of this architecture, whatever the config said.
    return gguf_experts(metadata, replace(shape, qk_norm="head"), normalise=True)


def _qwen2_gguf(metadata: GgufMetadata, shape: ModelShape) -> ModelShape:
    shared = metadata.size("expert_shared_feed_forward_length")
    return gguf_experts(metadata, shape, shared_size=shared, shared_gate=True)


FAMILIES = (
    Family("qwen3_moe", _QWEN3, _qwen3, layer=_LAYER, window="every_layer", resolve=_resolve),
    Family("qwen2_moe", _QWEN2, _qwen2, layer=_QWEN2_LAYER, window="layer_types"),
)
GGUF_FAMILIES = (
    GgufFamily("qwen3moe", _qwen3_gguf, layer=_GGUF_LAYER, read=EXPERT_KEYS),
    GgufFamily("qwen2moe", _qwen2_gguf, layer=_GGUF_LAYER, read=EXPERT_KEYS),
)
