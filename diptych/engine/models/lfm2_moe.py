"""LFM2-MoE: LFM2 with experts behind its first layers, weighed by sigmoids."""

from __future__ import annotations

from typing import Any

from diptych.engine.models.config_fields import llama_shape, unreadable
from diptych.engine.models.family import Config, Family, Names
from diptych.engine.models.lfm2 import LAYER_KINDS, LFM2_DEFAULTS, LFM2_LAYER, LFM2_MODEL, resolve_names
from diptych.engine.models.moe import with_experts
from diptych.engine.models.shape import ExpertsShape, ModelShape

_DEFAULTS = {
    **LFM2_DEFAULTS,
    "hidden_size": 2048,
    "intermediate_size": 7168,
    "moe_intermediate_size": 1792,
    "num_dense_layers": 2,
    "num_experts": 32,
    "num_experts_per_tok": 4,
    "use_expert_bias": True,
    "routed_scaling_factor": 1.0,
    "norm_topk_prob": True,
}
_LAYER: Names = {
    **LFM2_LAYER,
    "router": "feed_forward.gate.weight",
    "correction_bias": "feed_forward.expert_bias",
    "experts.*.gate": "feed_forward.experts.{}.w1.weight",
    "experts.*.up": "feed_forward.experts.{}.w3.weight",
    "experts.*.down": "feed_forward.experts.{}.w2.weight",
}


def _resolve(resolved: dict[str, Any]) -> None:
    resolve_names(resolved)
    if resolved["layer_types"] is None:
        raise unreadable("layer_types is missing: the config does not say which layers attend")


def _shape(config: Config, tied: bool) -> ModelShape:
    experts = ExpertsShape(
        num_experts=config["num_experts"],
        experts_per_token=config["num_experts_per_tok"],
        intermediate_size=config["moe_intermediate_size"],
        routing="sigmoid",
        normalise=config["norm_topk_prob"],
        scale=float(config["routed_scaling_factor"]),
        correction_bias=config["use_expert_bias"],
    )
    shape = llama_shape(config, tied, qk_norm="head")
    dense = config["num_dense_layers"]
    return with_experts(shape, experts, (layer >= dense for layer in range(shape.num_layers)))


FAMILIES = (
    Family(
        "lfm2_moe",
        _DEFAULTS,
        _shape,
        layer=_LAYER,
        model=LFM2_MODEL,
        rope_theta=1_000_000.0,
        resolve=_resolve,
        layer_kinds=LAYER_KINDS,
    ),
)
