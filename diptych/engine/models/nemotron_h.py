"""Nemotron-H: layers that are Mamba-2, attention without positions, or a feed-forward, never two of them."""

from __future__ import annotations

import math
from typing import Any

from diptych.engine.models.config_fields import llama_shape, unreadable
from diptych.engine.models.family import LLAMA_MODEL, Config, Family, Names, Stored
from diptych.engine.models.mamba2_fields import mamba2_names, space_shape
from diptych.engine.models.shape import ExpertsShape, LayerShape, ModelShape, UnsupportedModel

_DEFAULTS = {
    "vocab_size": 131072,
    "hidden_size": 4096,
    "intermediate_size": 21504,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 4096,
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": False,
    "eos_token_id": 2,
    "layers_block_type": None,
    "mlp_hidden_act": "relu2",
    "ssm_state_size": 128,
    "mamba_num_heads": 128,
    "mamba_head_dim": 64,
    "mamba_hidden_act": "silu",
    "n_groups": 8,
    "time_step_min": 0.001,
    "conv_kernel": 4,
    "use_conv_bias": True,
    "use_bias": False,
    "layer_norm_epsilon": 1e-5,
    "n_routed_experts": 8,
    "moe_intermediate_size": 7688,
    "moe_shared_expert_intermediate_size": 7688,
    "num_experts_per_tok": 2,
    "routed_scaling_factor": 1.0,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
}
_PATTERN = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}
_USUAL = ["linear_attention", "moe", "full_attention", "mlp"]
"""Layers of a config that names none."""
_KINDS = frozenset(_PATTERN.values())
_OLD_KINDS = {"mamba": "linear_attention", "attention": "full_attention"}
_OLD_NAMES = {
    "mamba_n_groups": "n_groups",
    "mamba_d_conv": "conv_kernel",
    "mamba_dt_min": "time_step_min",
    "mamba_conv_bias": "use_conv_bias",
    "num_local_experts": "n_routed_experts",
}
_LAYER: Names = {
    "input_norm": Stored("norm.weight", float32=True),
    "post_norm": Stored("norm.weight", float32=True),
    **{field: f"mixer.{field}_proj.weight" for field in ("q", "k", "v", "o", "up", "down")},
    **{f"{field}_bias": f"mixer.{field}_proj.bias" for field in ("q", "k", "v", "o", "up", "down")},
    **mamba2_names("mixer."),
    "router": "mixer.gate.weight",
    "correction_bias": "mixer.gate.e_score_correction_bias",
    "experts.*.up": "mixer.experts.{}.up_proj.weight",
    "experts.*.down": "mixer.experts.{}.down_proj.weight",
    "shared.up": "mixer.shared_experts.up_proj.weight",
    "shared.down": "mixer.shared_experts.down_proj.weight",
}


def _resolve(resolved: dict[str, Any]) -> None:
    """Fill in the layers' kinds, of which older files have a letter each, and Llama's names of fields."""
    for old, name in _OLD_NAMES.items():
        if old in resolved:
            resolved[name] = resolved[old]
    kinds, pattern = resolved["layers_block_type"], resolved.get("hybrid_override_pattern")
    kinds = resolved.get("layer_types") if kinds is None else kinds
    if kinds is None and pattern is None:
        kinds = _USUAL
    if kinds is None:
        if not isinstance(pattern, str) or not set(pattern) <= set(_PATTERN):
            raise unreadable(f"hybrid_override_pattern is {pattern!r}, not a letter of M, *, - and E a layer")
        kinds = [_PATTERN[letter] for letter in pattern]
    if not isinstance(kinds, list):
        raise unreadable(f"layers_block_type is {kinds!r}, not a list of layers")
    kinds = [_OLD_KINDS.get(str(kind), str(kind)) for kind in kinds]
    if unknown := sorted(set(kinds) - _KINDS):
        raise UnsupportedModel(f"layers_block_type: {', '.join(unknown)}")
    resolved["layer_types"], resolved["num_hidden_layers"] = kinds, len(kinds)
    resolved["rms_norm_eps"] = resolved["layer_norm_epsilon"]
    resolved["hidden_act"] = resolved["mlp_hidden_act"]


def _mamba2(config: Config) -> LayerShape:
    space = space_shape(
        config,
        heads=config["mamba_num_heads"],
        head_dim=config["mamba_head_dim"],
        groups=config["n_groups"],
        state=config["ssm_state_size"],
        taps=config["conv_kernel"],
        conv_bias=config["use_conv_bias"],
        in_bias=config["use_bias"],
        out_bias=config["use_bias"],
        # transformers reads this field here, and not time_step_limit.
        step_bounds=(config["time_step_min"], math.inf),
    )
    return LayerShape(attention=False, recurrent=space, feed_forward=False)


def _experts(config: Config) -> ExpertsShape:
    return ExpertsShape(
        num_experts=config["n_routed_experts"],
        experts_per_token=config["num_experts_per_tok"],
        intermediate_size=config["moe_intermediate_size"],
        routing="sigmoid",
        normalise=config["norm_topk_prob"],
        scale=float(config["routed_scaling_factor"]),
        correction_bias=True,
        shared_size=config["moe_shared_expert_intermediate_size"],
        groups=config["n_group"],
        groups_per_token=config["topk_group"],
        group_score="best_two",
        gated=False,
    )


def _shape(config: Config, tied: bool) -> ModelShape:
    experts = _experts(config) if "moe" in config["layer_types"] else None
    return llama_shape(config, tied, experts=experts, gated=False)


def _attention(_: Config) -> LayerShape:
    return LayerShape(rotation=None, feed_forward=False)


def _feed_forward(_: Config) -> LayerShape:
    return LayerShape(attention=False)


def _of_experts(_: Config) -> LayerShape:
    return LayerShape(attention=False, experts=True)


FAMILIES = (
    Family(
        "nemotron_h",
        _DEFAULTS,
        _shape,
        layer=_LAYER,
        model={
            **LLAMA_MODEL,
            "embed": "model.embeddings.weight",
            "final_norm": Stored("model.norm_f.weight", float32=True),
        },
        resolve=_resolve,
        layer_kinds={
            "linear_attention": _mamba2,
            "full_attention": _attention,
            "mlp": _feed_forward,
            "moe": _of_experts,
        },
        neutral={"mamba_hidden_act": ("silu", "swish"), "moe_latent_size": (None,)},
    ),
)
