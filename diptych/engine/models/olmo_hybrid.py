"""OLMo Hybrid: the gated delta rule in three layers of four, OLMo's attention in the fourth.

Layers with attention have norms after their sublayers, as OLMo 2 and 3 have, the others before them.
"""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType
from typing import Any

from diptych.engine.models.config_fields import llama_shape, unreadable
from diptych.engine.models.family import LLAMA_LAYER, Config, Family, Names, Stored
from diptych.engine.models.recurrent_shapes import DeltaShape
from diptych.engine.models.shape import LayerShape, ModelShape

_DEFAULTS = {
    "vocab_size": 100352,
    "hidden_size": 3840,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 30,
    "num_key_value_heads": None,
    "hidden_act": "silu",
    "max_position_embeddings": 65536,
    "rms_norm_eps": 1e-6,
    "attention_bias": False,
    "tie_word_embeddings": False,
    "eos_token_id": 100257,
    "layer_types": None,
    "linear_num_key_heads": None,
    "linear_num_value_heads": None,
    "linear_key_head_dim": None,
    "linear_value_head_dim": None,
    "linear_conv_kernel_dim": 4,
    "linear_allow_neg_eigval": True,
}
_NORM_EPS = 1e-5
"""Epsilon of the delta rule's own norms, whatever the model's."""
_LAYER: Names = MappingProxyType(
    {
        **{name: at for name, at in LLAMA_LAYER.items() if not name.endswith("_bias")},
        "input_norm": "attention_layer_norm.weight",
        "post_norm": "feedforward_layer_norm.weight",
        "attention_out_norm": "feedforward_layer_norm.weight",
        "feed_forward_out_norm": "post_feedforward_layernorm.weight",
        **{f"recurrent.{part}_proj": f"linear_attn.{part}_proj.weight" for part in ("q", "k", "v")},
        **{f"recurrent.{part}_conv": f"linear_attn.{part}_conv1d.weight" for part in ("q", "k", "v")},
        "recurrent.gate_proj": "linear_attn.g_proj.weight",
        "recurrent.rate": "linear_attn.b_proj.weight",
        "recurrent.step": "linear_attn.a_proj.weight",
        "recurrent.decay": Stored("linear_attn.A_log", float32=True),
        "recurrent.step_bias": Stored("linear_attn.dt_bias", float32=True),
        "recurrent.norm": Stored("linear_attn.o_norm.weight", float32=True),
        "recurrent.out_proj": "linear_attn.o_proj.weight",
    }
)


def _resolve(resolved: dict[str, Any]) -> None:
    """Fill in the layers' kinds and the sizes of the delta rule that follow from others."""
    count = resolved["num_hidden_layers"]
    resolved["head_dim"] = None
    if resolved["layer_types"] is None:
        kinds = ["full_attention" if layer % 4 == 3 else "linear_attention" for layer in range(count)]
        resolved["layer_types"] = kinds if count > 3 else [*kinds[:-1], "full_attention"]
    heads = resolved["num_attention_heads"]
    for field in ("linear_num_key_heads", "linear_num_value_heads"):
        resolved[field] = heads if resolved[field] is None else resolved[field]
    if resolved["linear_key_head_dim"] is None:
        share = max(int(resolved["linear_num_key_heads"]), 1)
        resolved["linear_key_head_dim"] = int(0.75 * resolved["hidden_size"] / share)
    if resolved["linear_value_head_dim"] is None:
        resolved["linear_value_head_dim"] = 2 * resolved["linear_key_head_dim"]
    rope = resolved.get("rope_parameters") or {}
    # A base of null, as published models have it: nothing is rotated.
    resolved["rotates"] = not isinstance(rope, dict) or rope.get("rope_theta", 0) is not None
    if not resolved["rotates"]:
        resolved["rope_parameters"] = None


def _delta(config: Config) -> LayerShape:
    fields = ("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim", "conv_kernel_dim")
    sizes = [config[f"linear_{field}"] for field in fields]
    if not all(isinstance(size, int) and size > 0 for size in sizes) or sizes[1] % sizes[0]:
        raise unreadable(f"sizes of linear layers are {sizes}")
    rate = 2.0 if config["linear_allow_neg_eigval"] else 1.0
    delta = replace(DeltaShape(*sizes), apart=True, largest_rate=rate, norm_eps=_NORM_EPS)
    return LayerShape(attention=False, recurrent=delta, norms="before")


def _attention(config: Config) -> LayerShape:
    return LayerShape(rotation=0 if config["rotates"] else None)


def _shape(config: Config, tied: bool) -> ModelShape:
    return llama_shape(config, tied, qk_norm="width", norms="after")


FAMILIES = (
    Family(
        "olmo_hybrid",
        _DEFAULTS,
        _shape,
        layer=_LAYER,
        # transformers renames this norm with that of the other layers when it saves a model.
        elsewhere={"attention_out_norm": "post_attention_layernorm.weight"},
        resolve=_resolve,
        layer_kinds={"linear_attention": _delta, "full_attention": _attention},
        neutral={"hidden_act": ("silu", "swish"), "attention_bias": (False,)},
    ),
)
