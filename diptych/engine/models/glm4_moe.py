"""GLM-4.5 and its kind: partly rotated heads, dense layers first, a shared expert, sigmoid routing."""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType
from typing import Any

from diptych.engine.models.config_fields import COMMON, llama_shape
from diptych.engine.models.family import (
    GGUF_LAYER,
    LLAMA_LAYER,
    Config,
    Family,
    GgufFamily,
    GgufMetadata,
)
from diptych.engine.models.moe import (
    EXPERT_KEYS,
    EXPERT_MATRICES,
    GGUF_EXPERTS,
    SHARED_EXPERT,
    gguf_experts,
    with_experts,
)
from diptych.engine.models.shape import ExpertsShape, ModelShape, UnsupportedModel

_DEFAULTS = {
    **COMMON,
    "vocab_size": 151552,
    "intermediate_size": 10944,
    "num_hidden_layers": 46,
    "num_attention_heads": 96,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "moe_intermediate_size": 1408,
    "num_experts_per_tok": 8,
    "n_shared_experts": 1,
    "n_routed_experts": 128,
    "routed_scaling_factor": 1.0,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "norm_topk_prob": True,
    "use_qk_norm": False,
}


def _resolve(resolved: dict[str, Any]) -> None:
    resolved.setdefault("partial_rotary_factor", 0.5)


def sigmoid_experts(config: Config) -> ExpertsShape:
    """Return the experts that the fields of DeepSeek-V3 describe, which GLM-4.5 shares."""
    return ExpertsShape(
        num_experts=config["n_routed_experts"],
        experts_per_token=config["num_experts_per_tok"],
        intermediate_size=config["moe_intermediate_size"],
        routing="sigmoid",
        normalise=config["norm_topk_prob"],
        scale=float(config["routed_scaling_factor"]),
        correction_bias=True,
        groups=config["n_group"] or 1,
        groups_per_token=config["topk_group"] or 1,
        group_score="best_two",
        shared_size=config["moe_intermediate_size"] * config["n_shared_experts"],
    )


def _shape(config: Config, tied: bool) -> ModelShape:
    qk_norm = "head" if config["use_qk_norm"] else "none"
    shape = llama_shape(config, tied, output_bias=False, qk_norm=qk_norm)
    dense = config["first_k_dense_replace"]
    return with_experts(shape, sigmoid_experts(config), (layer >= dense for layer in range(shape.num_layers)))


def _gguf(metadata: GgufMetadata, shape: ModelShape) -> ModelShape:
    if metadata.integer("expert_gating_func") not in (None, 0, 2):
        raise UnsupportedModel(f"metadata {metadata.key('expert_gating_func')}: only sigmoids are computed")
    behind = metadata.integer("nextn_predict_layers") or 0
    shape = replace(shape, layers=shape.layers[: shape.num_layers - behind])
    size = metadata.size("expert_feed_forward_length")
    return gguf_experts(
        metadata,
        shape,
        routing="sigmoid",
        normalise=bool(metadata.get("expert_weights_norm")),
        scale=metadata.number("expert_weights_scale") or 1.0,
        correction_bias=True,
        shared_size=size * (metadata.integer("expert_shared_count") or 0),
        groups=metadata.integer("expert_group_count") or 1,
        groups_per_token=metadata.integer("expert_group_used_count") or 1,
        group_score="best_two",
    )


FAMILIES = (
    Family(
        "glm4_moe",
        _DEFAULTS,
        _shape,
        layer=MappingProxyType({**LLAMA_LAYER, **EXPERT_MATRICES, **SHARED_EXPERT}),
        resolve=_resolve,
        partial_rotary=True,
        layers_behind="num_nextn_predict_layers",
    ),
)
GGUF_FAMILIES = (
    GgufFamily(
        "glm4moe",
        _gguf,
        layer=MappingProxyType(
            {
                **{name: at for name, at in GGUF_LAYER.items() if name != "attention_out_norm"},
                **GGUF_EXPERTS,
                "post_norm": "post_attention_norm.weight",
            }
        ),
        read=EXPERT_KEYS,
        layers_behind="nextn_predict_layers",
    ),
)
