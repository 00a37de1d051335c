"""Fields and tensor names that families with experts share."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from diptych.engine.models.family import GgufMetadata, Names, Stored
from diptych.engine.models.shape import ExpertsShape, ModelShape

EXPERT_MATRICES: Names = MappingProxyType(
    {
        "router": "mlp.gate.weight",
        "experts.*.gate": "mlp.experts.{}.gate_proj.weight",
        "experts.*.up": "mlp.experts.{}.up_proj.weight",
        "experts.*.down": "mlp.experts.{}.down_proj.weight",
    }
)
"""Places of experts in most folders."""
_GATE_UP = ("experts.{}.gate", "experts.{}.up")
STACKED_EXPERTS: Names = MappingProxyType(
    {
        "experts.*.gate": Stored("mlp.experts.gate_up_proj", _GATE_UP, stacked=True),
        "experts.*.up": Stored("mlp.experts.gate_up_proj", _GATE_UP, stacked=True),
        "experts.*.down": Stored("mlp.experts.down_proj", stacked=True),
    }
)
"""Places of experts in folders that have all of a layer in one tensor."""
SHARED_EXPERT: Names = MappingProxyType(
    {
        "shared.gate": "mlp.shared_experts.gate_proj.weight",
        "shared.up": "mlp.shared_experts.up_proj.weight",
        "shared.down": "mlp.shared_experts.down_proj.weight",
        "correction_bias": "mlp.gate.e_score_correction_bias",
    }
)
GGUF_EXPERTS: Names = MappingProxyType(
    {
        "router": "ffn_gate_inp.weight",
        "router_bias": "ffn_gate_inp.bias",
        "correction_bias": "exp_probs_b.bias",
        "experts.*.gate": Stored("ffn_gate_exps.weight", stacked=True),
        "experts.*.up": Stored("ffn_up_exps.weight", stacked=True),
        "experts.*.down": Stored("ffn_down_exps.weight", stacked=True),
        "experts.*.gate_bias": Stored("ffn_gate_exps.bias", stacked=True),
        "experts.*.up_bias": Stored("ffn_up_exps.bias", stacked=True),
        "experts.*.down_bias": Stored("ffn_down_exps.bias", stacked=True),
        "shared.gate": "ffn_gate_shexp.weight",
        "shared.up": "ffn_up_shexp.weight",
        "shared.down": "ffn_down_shexp.weight",
        "shared_router": Stored("ffn_gate_inp_shexp.weight", make=lambda tensor, _, __: tensor.view(1, -1)),
    }
)
EXPERT_KEYS = frozenset(
    {
        *("expert_count", "expert_used_count", "expert_feed_forward_length", "expert_shared_count"),
        *("expert_shared_feed_forward_length", "leading_dense_block_count", "expert_gating_func"),
        *("expert_weights_norm", "expert_weights_scale", "expert_group_count", "expert_group_used_count"),
    }
)
"""Keys of experts in GGUF files."""


def with_experts(shape: ModelShape, experts: ExpertsShape, layers: Iterable[bool]) -> ModelShape:
    """Return `shape` with `experts` in the layers that `layers` marks, one mark a layer."""
    marked = zip(shape.layers, layers, strict=True)
    return replace(
        shape, experts=experts, layers=tuple(replace(layer, experts=mark) for layer, mark in marked)
    )


def gguf_experts(metadata: GgufMetadata, shape: ModelShape, **switches: Any) -> ModelShape:
    """Return `shape` with the experts that a file's common keys describe; `switches` are further fields.

    Raises UnsupportedModel or BadModelFile.
    """
    size = metadata.integer("expert_feed_forward_length") or shape.intermediate_size
    experts = ExpertsShape(
        num_experts=metadata.size("expert_count"),
        experts_per_token=metadata.size("expert_used_count"),
        intermediate_size=size,
        **switches,
    )
    dense = metadata.integer("leading_dense_block_count") or 0
    return with_experts(shape, experts, (number >= dense for number in range(shape.num_layers)))
