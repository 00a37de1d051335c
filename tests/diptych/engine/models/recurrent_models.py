"""Tiny random models of every family with recurrent layers, as transformers computes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from tests.diptych.engine.models.family_models import GRANITE, SIZES, WIDE

_DELTA = {
    **WIDE,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
}
_EXPERTS = {
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 20,
}
_MAMBA2 = {"mamba_n_heads": 6, "mamba_n_groups": 2, "mamba_d_state": 12}
_GRANITE = {
    **GRANITE,
    **_MAMBA2,
    "layer_types": ["mamba", "attention", "mamba", "mamba"],
    "shared_intermediate_size": 40,
}
_NEMOTRON = {
    **WIDE,
    "mamba_num_heads": 6,
    "mamba_head_dim": 8,
    "n_groups": 2,
    "ssm_state_size": 12,
}

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3-next": ("qwen3_next", {**_DELTA, **_EXPERTS, "mlp_only_layers": [1]}),
    "qwen3.5": ("qwen3_5_text", _DELTA),
    "qwen3.5-experts": ("qwen3_5_moe_text", {**_DELTA, **_EXPERTS}),
    "granite4-h": (
        "granitemoehybrid",
        {**_GRANITE, "num_local_experts": 5, "num_experts_per_tok": 2, "mamba_proj_bias": True},
    ),
    "granite4-h-dense": (
        "granitemoehybrid",
        {**_GRANITE, "num_local_experts": 0, "position_embedding_type": "rope", "mamba_conv_bias": False},
    ),
    "bamba": ("bamba", {**_MAMBA2, "attn_layer_indices": [1, 3], "time_step_limit": (0.3, 0.9)}),
    "falcon-h1": (
        "falcon_h1",
        {
            **WIDE,
            **_MAMBA2,
            "mamba_d_ssm": 48,
            "mamba_d_head": 8,
            "ssm_multipliers": [0.7, 1.3, 0.8, 1.2, 0.9],
            "mlp_multipliers": [0.8, 1.3],
            "key_multiplier": 0.6,
            "attention_in_multiplier": 1.4,
            "attention_out_multiplier": 0.7,
            "ssm_in_multiplier": 1.2,
            "ssm_out_multiplier": 0.8,
            "lm_head_multiplier": 0.5,
            "embedding_multiplier": 2.0,
        },
    ),
    "falcon-h1-norm": (
        "falcon_h1",
        {**_MAMBA2, "mamba_d_ssm": None, "mamba_rms_norm": True, "key_multiplier": 1.5},
    ),
    "nemotron-h": ("nemotron_h", {**_NEMOTRON, "hybrid_override_pattern": "MM*-M-*", "time_step_min": 0.5}),
    "nemotron-h-experts": (
        "nemotron_h",
        {
            **_NEMOTRON,
            "hybrid_override_pattern": "ME*-ME*E",
            "n_routed_experts": 6,
            "n_group": 2,
            "topk_group": 1,
            "moe_intermediate_size": 24,
            "moe_shared_expert_intermediate_size": 28,
            "routed_scaling_factor": 1.5,
            "time_step_min": 0.5,
            "use_bias": True,
        },
    ),
    "jamba": (
        "jamba",
        {
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "num_experts": 4,
            "mamba_d_state": 6,
            "mamba_dt_rank": 5,
            "mamba_proj_bias": True,
        },
    ),
    "lfm2-experts": (
        "lfm2_moe",
        {
            "num_dense_layers": 1,
            "layer_types": ["conv", "full_attention", "conv", "full_attention"],
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "routed_scaling_factor": 1.3,
        },
    ),
}
"""For each case the `model_type`, and fields of its config beside `SIZES`."""


def config_of(name: str) -> Any:
    """Return transformers' config of a case."""
    model_type, fields = CASES[name]
    # Of this family the layers' kinds alone say how many there are.
    left_out = "num_hidden_layers" if model_type == "nemotron_h" else None
    sizes = {field: value for field, value in SIZES.items() if field != left_out}
    return CONFIG_MAPPING[model_type](**{**sizes, **fields})


def oracle_of(name: str) -> Any:
    """Return transformers' random model of a case, in float32."""
    torch.manual_seed(11)
    config = config_of(name)
    oracle = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval().float()
    stored_less_one = config.model_type.startswith("qwen3")
    with torch.no_grad():
        for name_of, parameter in oracle.named_parameters():
            parameter.normal_(*_about(name_of, stored_less_one))
        for name_of, buffer in oracle.named_buffers():
            if name_of.endswith("bias"):
                buffer.normal_(0.0, 0.2)
    return oracle


def _about(name: str, stored_less_one: bool) -> tuple[float, float]:
    """Return mean and deviation of a tensor's numbers: what is left out is to show, and the first tokens are
    to be felt by the last.
    """
    if name.endswith("A_log"):
        return -2.0, 0.5
    if name.endswith(".D"):
        return 1.0, 0.5
    if "norm" in name:
        return 0.0 if stored_less_one and "linear_attn" not in name else 1.0, 0.5
    return 0.0, 0.5 if name.endswith("bias") else 0.15


def save(oracle: Any, folder: Path) -> Path:
    """Save a model and return its folder."""
    oracle.save_pretrained(folder)
    return folder
