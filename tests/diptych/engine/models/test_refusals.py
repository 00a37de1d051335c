"""Fields of the dense families' configs that are refused by their names."""

from __future__ import annotations

from typing import Any

import pytest

from diptych.engine.models.config_fields import resolve_config, shape_from_config
from diptych.engine.models.shape import ModelShape, UnsupportedModel
from diptych.model_families import MODEL_TYPES, NOT_COMPUTED

HYBRID = {"layer_types": ["attention"] * 32, "num_local_experts": 0}


def shape_of(config: dict[str, Any]) -> ModelShape:
    return shape_from_config(resolve_config(config), tied=False)


@pytest.mark.parametrize(
    ("model_type", "fields", "named"),
    [
        ("gemma", {"use_bidirectional_attention": True}, "use_bidirectional_attention True"),
        ("gemma2", {"hidden_activation": "tanh"}, "hidden_activation 'tanh'"),
        ("gemma2", {"attn_logit_softcapping": "50"}, "attn_logit_softcapping is '50'"),
        ("gemma2", {"sliding_window_pattern": 0}, "sliding_window_pattern is 0"),
        ("gemma3_text", {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "rope_type 'dynamic'"),
        ("phi3", {"rope_scaling": {"type": "su"}}, "longrope lack short_factor, long_factor"),
        ("phi3", {"partial_rotary_factor": 0.01}, "rotated lanes"),
        ("granite", {"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ("granite", {"residual_multiplier": "0.2"}, "residual_multiplier is '0.2'"),
        ("granitemoehybrid", {}, "layer_types: all layers are recurrent"),
        ("granitemoehybrid", {**HYBRID, "layer_types": ["mamba"] * 32}, "no layer attends"),
        ("smollm3", {"no_rope_layers": [1, 0]}, "no_rope_layers"),
        ("olmo3", {"layer_types": ["linear_attention"] * 32}, "layer_types: linear_attention"),
        ("exaone4", {"sliding_window_pattern": "LLX"}, "sliding_window_pattern is 'LLX'"),
        ("cohere", {"use_qk_norm": True}, "use_qk_norm True"),
        ("stablelm", {"qk_layernorm": True}, "qk_layernorm True"),
        ("starcoder2", {"use_bias": None}, "use_bias is None"),
        ("nemotron", {"hidden_act": "relu"}, "hidden_act 'relu'"),
        ("hunyuan_v1_dense", {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "without alpha"),
        ("internlm3", {"qkv_bias": "yes"}, "qkv_bias is 'yes'"),
        ("ministral3", {"rope_parameters": {"rope_type": "default"}}, "llama_4_scaling_beta"),
    ],
)
def test_field_that_is_not_computed_is_named(model_type: str, fields: dict[str, Any], named: str) -> None:
    with pytest.raises(UnsupportedModel, match=named):
        shape_of({"model_type": model_type, **fields})


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_more_layers_than_any_model_has_are_refused(model_type: str) -> None:
    with pytest.raises(UnsupportedModel, match="1000000000 layers"):
        shape_of({"model_type": model_type, "num_hidden_layers": 10**9})


@pytest.mark.parametrize("model_type", ["rwkv", "zamba2", "mamba2"])
def test_recurrent_model_is_refused_by_its_name(model_type: str) -> None:
    with pytest.raises(UnsupportedModel, match=f"'{model_type}': its layers keep a recurrent state"):
        shape_of({"model_type": model_type})
    assert model_type in NOT_COMPUTED


def test_wrapper_without_a_text_model_is_refused() -> None:
    with pytest.raises(UnsupportedModel, match="gemma3 has no text_config"):
        shape_of({"model_type": "gemma3"})
