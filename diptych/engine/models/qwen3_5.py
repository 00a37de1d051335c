"""The text models of Qwen3.5, dense and with experts: Qwen3-Next with the delta rule's matrices apart.

Text alone is computed: a token's three positions are one then.
"""

from __future__ import annotations

from typing import Any

from diptych.engine.models.family import Config, Family, Names
from diptych.engine.models.moe import STACKED_EXPERTS
from diptych.engine.models.qwen3_moe import QWEN2_EXPERTS, qwen_experts
from diptych.engine.models.qwen3_next import (
    DELTA_DEFAULTS,
    DELTA_LAYER,
    DELTA_MODEL,
    LAYER_KINDS,
    NEUTRAL,
    delta_shape,
    resolve_delta,
)
from diptych.engine.models.shape import ModelShape

_DENSE = {
    **DELTA_DEFAULTS,
    "vocab_size": 248320,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 32,
    "num_key_value_heads": 4,
    "max_position_embeddings": 32768,
}
_EXPERTS = {
    **DELTA_DEFAULTS,
    "vocab_size": 248320,
    "hidden_size": 2048,
    "num_hidden_layers": 40,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32768,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "num_experts_per_tok": 8,
    "num_experts": 256,
}
_LAYER: Names = {
    **DELTA_LAYER,
    "recurrent.qkv_proj": "linear_attn.in_proj_qkv.weight",
    "recurrent.gate_proj": "linear_attn.in_proj_z.weight",
    "recurrent.rate": "linear_attn.in_proj_b.weight",
    "recurrent.step": "linear_attn.in_proj_a.weight",
}


def _resolve(resolved: dict[str, Any]) -> None:
    """Give a rotation of sections its kind, as text has one position, and the layers theirs."""
    resolve_delta(resolved)
    for field in ("rope_scaling", "rope_parameters"):
        rope = resolved.get(field)
        if isinstance(rope, dict) and rope.get("rope_type", rope.get("type")) == "mrope":
            resolved[field] = {**rope, "rope_type": "default"}


def _resolve_experts(resolved: dict[str, Any]) -> None:
    """Fill in a width of dense feed-forwards, of which these models have none."""
    _resolve(resolved)
    resolved.setdefault("intermediate_size", resolved["moe_intermediate_size"])


def _with_experts(config: Config, tied: bool) -> ModelShape:
    every = {**config, "decoder_sparse_step": 1, "mlp_only_layers": [], "norm_topk_prob": True}
    return qwen_experts(every, delta_shape(config, tied))


def _family(
    name: str, defaults: dict[str, object], shape: Any, layer: Names, resolve: Any, stacked: Names
) -> Family:
    return Family(
        name,
        defaults,
        shape,
        layer=layer,
        model=DELTA_MODEL,
        resolve=resolve,
        layer_kinds=LAYER_KINDS,
        neutral=NEUTRAL,
        partial_rotary=True,
        stacked=stacked,
    )


FAMILIES = (
    _family("qwen3_5_text", _DENSE, delta_shape, _LAYER, _resolve, {}),
    _family(
        "qwen3_5_moe_text",
        _EXPERTS,
        _with_experts,
        {**_LAYER, **QWEN2_EXPERTS},
        _resolve_experts,
        STACKED_EXPERTS,
    ),
)
