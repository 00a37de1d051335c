"""Jamba: Mamba in most layers, attention without positions in some, and experts in every other."""

from __future__ import annotations

import math
from typing import Any

from diptych.engine.models.bamba import HYBRID_LAYER, HYBRID_MODEL
from diptych.engine.models.config_fields import llama_shape, unreadable
from diptych.engine.models.family import Config, Family, Names, Stored
from diptych.engine.models.mamba2_fields import expanded_width, mamba_names
from diptych.engine.models.recurrent_shapes import ScanShape
from diptych.engine.models.shape import ExpertsShape, LayerShape, ModelShape

_DEFAULTS = {
    "vocab_size": 65536,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": None,
    "hidden_act": "silu",
    "max_position_embeddings": 262_144,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "eos_token_id": 2,
    "num_experts": 16,
    "num_experts_per_tok": 2,
    "expert_layer_period": 2,
    "expert_layer_offset": 1,
    "attn_layer_period": 8,
    "attn_layer_offset": 4,
    "mamba_d_state": 16,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_conv_bias": True,
    "mamba_proj_bias": False,
}
_LAYER: Names = {
    **HYBRID_LAYER,
    "router": "feed_forward.router.weight",
    **{
        f"experts.*.{field}": f"feed_forward.experts.{{}}.{field}_proj.weight"
        for field in ("gate", "up", "down")
    },
    **mamba_names("mamba."),
    "recurrent.x_proj": "mamba.x_proj.weight",
    "recurrent.step_proj": "mamba.dt_proj.weight",
    "recurrent.step_bias": Stored("mamba.dt_proj.bias", float32=True),
    "recurrent.step_norm": "mamba.dt_layernorm.weight",
    "recurrent.b_norm": "mamba.b_layernorm.weight",
    "recurrent.c_norm": "mamba.c_layernorm.weight",
}


def _every(config: Config, name: str) -> list[bool]:
    """Return which layers a period and an offset choose. Raises UnsupportedModel, naming the fields."""
    period, offset = config[f"{name}_layer_period"], config[f"{name}_layer_offset"]
    if not 0 <= offset < period:
        raise unreadable(f"{name}_layer_offset {offset} is no layer of {name}_layer_period {period}")
    return [layer % period == offset for layer in range(config["num_hidden_layers"])]


def _resolve(resolved: dict[str, Any]) -> None:
    """Fill in the layers' kinds, and the number of experts by its other name."""
    resolved["num_experts"] = resolved.get("num_local_experts", resolved["num_experts"])
    resolved["layer_types"] = [
        "full_attention" if attends else "linear_attention" for attends in _every(resolved, "attn")
    ]


def _mamba(config: Config) -> ScanShape:
    hidden, rank = config["hidden_size"], config.get("mamba_dt_rank", "auto")
    shape = ScanShape(
        width=expanded_width(config),
        state=config["mamba_d_state"],
        taps=config["mamba_d_conv"],
        rank=math.ceil(hidden / 16) if rank == "auto" else rank,
        conv_bias=config["mamba_conv_bias"],
        bias=config["mamba_proj_bias"],
    )
    if not isinstance(shape.rank, int) or min(shape.width, shape.state, shape.taps, shape.rank) < 1:
        raise unreadable(f"mamba_dt_rank is {rank!r}, or another size of Mamba is below 1")
    return shape


def _shape(config: Config, tied: bool) -> ModelShape:
    experts = None
    if config["num_experts"] > 1:
        experts = ExpertsShape(
            num_experts=config["num_experts"],
            experts_per_token=config["num_experts_per_tok"],
            intermediate_size=config["intermediate_size"],
        )
    mamba, marks = _mamba(config), _every(config, "expert")
    layers = tuple(
        LayerShape(rotation=None, attention=attends, recurrent=None if attends else mamba, experts=mark)
        for attends, mark in zip(
            _every(config, "attn"), marks if experts else [False] * len(marks), strict=True
        )
    )
    return llama_shape(config, tied, layers=layers, experts=experts)


def _own_layer(_: Config) -> LayerShape:
    return LayerShape()


FAMILIES = (
    Family(
        "jamba",
        _DEFAULTS,
        _shape,
        layer=_LAYER,
        model=HYBRID_MODEL,
        resolve=_resolve,
        layer_kinds={"linear_attention": _own_layer},
        neutral={"hidden_act": ("silu", "swish")},
    ),
)
