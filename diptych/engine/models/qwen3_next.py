"""Qwen3-Next: the gated delta rule in three layers of four, attention with a gate in the fourth, experts.

A head's query and its gate follow one another in one matrix, and so does what a head of keys and those of
values that it serves have of the delta rule's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch

from diptych.engine.models.config_fields import COMMON, llama_shape, unreadable
from diptych.engine.models.family import LLAMA_LAYER, LLAMA_MODEL, Config, Family, Names, Stored
from diptych.engine.models.qwen3_moe import QWEN2_EXPERTS, qwen_experts
from diptych.engine.models.recurrent_shapes import DeltaShape
from diptych.engine.models.shape import LayerShape, ModelShape

DELTA_DEFAULTS: Mapping[str, object] = {
    **COMMON,
    "num_attention_heads": 16,
    "head_dim": 256,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
}
"""Defaults that Qwen3-Next and Qwen3.5 share."""
_DEFAULTS = {
    **DELTA_DEFAULTS,
    "vocab_size": 151936,
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 48,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32768,
    "decoder_sparse_step": 1,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "num_experts_per_tok": 10,
    "num_experts": 512,
    "norm_topk_prob": True,
    "mlp_only_layers": None,
}


def _of_heads(field: str, shape: ModelShape, _: int) -> torch.Tensor:
    """Return the rows of queries, or of their gates, of a matrix that has both of each head."""
    lanes = torch.arange(shape.head_dim) + (shape.head_dim if field == "q_gate" else 0)
    return (torch.arange(shape.num_heads).unsqueeze(1) * 2 * shape.head_dim + lanes).flatten()


def _of_key_heads(field: str, shape: ModelShape, layer: int) -> torch.Tensor:
    """Return the rows of queries, keys and values, or of gates, of a matrix that has all of each key head."""
    delta = shape.layers[layer].recurrent
    assert isinstance(delta, DeltaShape)
    values = delta.value_heads // delta.key_heads * delta.value_dim
    widths = [delta.key_dim, delta.key_dim, values, values]
    parts = _parts_of_heads(delta.key_heads, widths)
    return parts[3] if field.endswith("gate_proj") else torch.cat(parts[:3])


def _rates(field: str, shape: ModelShape, layer: int) -> torch.Tensor:
    """Return the rows of rates, or of steps, of a matrix that has both of each key head."""
    delta = shape.layers[layer].recurrent
    assert isinstance(delta, DeltaShape)
    share = delta.value_heads // delta.key_heads
    rates, steps = _parts_of_heads(delta.key_heads, [share, share])
    return rates if field.endswith("rate") else steps


def _parts_of_heads(heads: int, widths: list[int]) -> list[torch.Tensor]:
    """Return the rows of each part of a matrix in which every head has so many rows of all parts."""
    rows = torch.arange(heads * sum(widths)).view(heads, -1)
    return [part.flatten() for part in rows.split(widths, dim=1)]


_QUERIES = Stored("self_attn.q_proj.weight", ("q", "q_gate"), rows=_of_heads)
_PROJECTIONS = Stored(
    "linear_attn.in_proj_qkvz.weight", ("recurrent.qkv_proj", "recurrent.gate_proj"), rows=_of_key_heads
)
_RATES = Stored("linear_attn.in_proj_ba.weight", ("recurrent.rate", "recurrent.step"), rows=_rates)
DELTA_LAYER: Names = MappingProxyType(
    {
        **LLAMA_LAYER,
        **{
            field: Stored(str(LLAMA_LAYER[field]), plus=1.0)
            for field in ("input_norm", "post_norm", "q_norm", "k_norm")
        },
        "q": _QUERIES,
        "q_gate": _QUERIES,
        "recurrent.conv": "linear_attn.conv1d.weight",
        "recurrent.decay": Stored("linear_attn.A_log", float32=True),
        "recurrent.step_bias": Stored("linear_attn.dt_bias", float32=True),
        "recurrent.norm": Stored("linear_attn.norm.weight", float32=True),
        "recurrent.out_proj": "linear_attn.out_proj.weight",
    }
)
"""Tensors that lie where they do in Qwen3-Next and Qwen3.5."""
DELTA_MODEL: Names = MappingProxyType({**LLAMA_MODEL, "final_norm": Stored("model.norm.weight", plus=1.0)})


def resolve_delta(resolved: dict[str, Any]) -> None:
    """Fill in the layers' kinds where the config has but the distance of those that attend, and the part of a
    head that is rotated.
    """
    resolved.setdefault("partial_rotary_factor", 0.25)
    interval = resolved.get("full_attention_interval", 4)
    if resolved["layer_types"] is None:
        if not isinstance(interval, int) or interval < 1:
            raise unreadable(f"full_attention_interval is {interval!r}, not a number of layers")
        layers = range(1, resolved["num_hidden_layers"] + 1)
        resolved["layer_types"] = [
            "linear_attention" if number % interval else "full_attention" for number in layers
        ]


def delta_layer(config: Config) -> LayerShape:
    """Return a layer of the gated delta rule. Raises UnsupportedModel for sizes that make no sense."""
    fields = ("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim", "conv_kernel_dim")
    sizes = [config[f"linear_{field}"] for field in fields]
    if min(sizes) < 1 or sizes[1] % sizes[0]:
        raise unreadable(
            f"linear_num_value_heads {sizes[1]} and linear_num_key_heads {sizes[0]}, or other sizes of linear"
            " layers"
        )
    return LayerShape(attention=False, recurrent=DeltaShape(*sizes))


def delta_shape(config: Config, tied: bool) -> ModelShape:
    """Return the shape that the fields of Qwen3-Next and Qwen3.5 share describe."""
    return llama_shape(config, tied, qk_norm="head", attention_gate=True)


def _shape(config: Config, tied: bool) -> ModelShape:
    return qwen_experts(config, delta_shape(config, tied))


LAYER_KINDS: Mapping[str, Callable[[Config], LayerShape]] = {"linear_attention": delta_layer}
NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "hidden_act": ("silu", "swish"),
    "attn_output_gate": (True,),
    "attention_bias": (False,),
}
"""Values of fields that are computed: a bias would be the gate's, too."""
FAMILIES = (
    Family(
        "qwen3_next",
        _DEFAULTS,
        _shape,
        layer={
            **DELTA_LAYER,
            **QWEN2_EXPERTS,
            "recurrent.qkv_proj": _PROJECTIONS,
            "recurrent.gate_proj": _PROJECTIONS,
            "recurrent.rate": _RATES,
            "recurrent.step": _RATES,
        },
        model=DELTA_MODEL,
        resolve=resolve_delta,
        layer_kinds=LAYER_KINDS,
        neutral=NEUTRAL,
        partial_rotary=True,
    ),
)
