"""gpt-oss: sinks, every second layer with a window, experts with biases and the clamped gate."""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType
from typing import Any

import torch

from diptych.engine.models.config_fields import COMMON, llama_shape
from diptych.engine.models.family import (
    GGUF_LAYER,
    LLAMA_ATTENTION,
    LLAMA_NORMS,
    Config,
    Extent,
    Family,
    GgufFamily,
    GgufMetadata,
    Stored,
)
from diptych.engine.models.moe import EXPERT_KEYS, GGUF_EXPERTS, gguf_experts, with_experts
from diptych.engine.models.shape import ExpertsShape, ModelShape, Rotation

_ROPE = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
_DEFAULTS = {
    **COMMON,
    "vocab_size": 201088,
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "head_dim": 64,
    "num_hidden_layers": 36,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "sliding_window": 128,
    "rms_norm_eps": 1e-5,
    "attention_bias": True,
    "num_local_experts": 128,
    "num_experts_per_tok": 4,
    "swiglu_alpha": 1.702,
    "swiglu_limit": 7.0,
}
_LIMIT = 7.0


def _half(tensor: torch.Tensor, field: str, _: ModelShape) -> torch.Tensor:
    """Return gate or up of one expert's `[hidden, 2 * n]` or bias `[2 * n]`, in which they take turns."""
    first = 0 if "gate" in field else 1
    return tensor.T[first::2] if tensor.ndim == 2 else tensor[first::2]


def _of_both(field: str, part: Extent, _: ModelShape) -> Extent:
    """Return where gate and up of some numbers lie, in a matrix or a bias."""
    rows, columns = part
    turns = None if rows is None else range(2 * rows.start, 2 * rows.stop)
    return (turns, None) if field.endswith("_bias") else (columns, turns)


def _transposed(tensor: torch.Tensor, _: str, __: ModelShape) -> torch.Tensor:
    return tensor.T


def _of_transposed(_: str, part: Extent, __: ModelShape) -> Extent:
    rows, columns = part
    return columns, rows


def _turns(field: str) -> slice:
    """Return the rows of gate or up in the blocks of both."""
    return slice(0 if "gate" in field else 1, None, 2)


def _every_row(_: str) -> slice:
    return slice(None)


_GATE_UP = Stored("mlp.experts.gate_up_proj", stacked=True, make=_half, made_of=_of_both, block_rows=_turns)
_GATE_UP_BIAS = Stored("mlp.experts.gate_up_proj_bias", stacked=True, make=_half, made_of=_of_both)
_LAYER = MappingProxyType(
    {
        **LLAMA_NORMS,
        **LLAMA_ATTENTION,
        "sinks": "self_attn.sinks",
        "router": "mlp.router.weight",
        "router_bias": "mlp.router.bias",
        "experts.*.gate": _GATE_UP,
        "experts.*.up": _GATE_UP,
        "experts.*.gate_bias": _GATE_UP_BIAS,
        "experts.*.up_bias": _GATE_UP_BIAS,
        "experts.*.down": Stored(
            "mlp.experts.down_proj",
            stacked=True,
            make=_transposed,
            made_of=_of_transposed,
            block_rows=_every_row,
        ),
        "experts.*.down_bias": Stored("mlp.experts.down_proj_bias", stacked=True),
    }
)


def _resolve(config: dict[str, Any]) -> None:
    if config.get("rope_scaling") is None and config.get("rope_parameters") is None:
        config["rope_parameters"] = dict(_ROPE)
    if config["layer_types"] is None:
        turns = ("sliding_attention", "full_attention")
        config["layer_types"] = [turns[layer % 2] for layer in range(config["num_hidden_layers"])]


def _shape(config: Config, tied: bool) -> ModelShape:
    shape = llama_shape(config, tied, sinks=True, activation="clamped_swiglu")
    experts = ExpertsShape(
        num_experts=config["num_local_experts"],
        experts_per_token=config["num_experts_per_tok"],
        intermediate_size=config["intermediate_size"],
        routing="topk_then_softmax",
        router_bias=True,
        bias=True,
        clamp=float(config["swiglu_limit"]),
    )
    return with_experts(shape, experts, [True] * shape.num_layers)


def _gguf(metadata: GgufMetadata, shape: ModelShape) -> ModelShape:
    layers = tuple(
        replace(layer, window=None) if number % 2 else layer for number, layer in enumerate(shape.layers)
    )
    shape = replace(
        shape,
        layers=layers,
        rotations=tuple(_not_truncated(rotation) for rotation in shape.rotations),
        sinks=True,
        activation="clamped_swiglu",
    )
    return gguf_experts(
        metadata, shape, routing="topk_then_softmax", router_bias=True, bias=True, clamp=_LIMIT
    )


def _not_truncated(rotation: Rotation) -> Rotation:
    """Return the rotation with borders of its blend as the model has them; a file does not say it."""
    scaling = rotation.scaling
    return rotation if scaling is None else replace(rotation, scaling=replace(scaling, truncate=False))


FAMILIES = (
    Family(
        "gpt_oss",
        _DEFAULTS,
        _shape,
        layer=_LAYER,
        rope_theta=150_000.0,
        window="layer_types",
        resolve=_resolve,
        neutral={"swiglu_alpha": (1.702,), "hidden_act": ("silu",)},
    ),
)
GGUF_FAMILIES = (
    GgufFamily(
        "gpt-oss",
        _gguf,
        layer=MappingProxyType(
            {
                **{name: at for name, at in GGUF_LAYER.items() if name != "attention_out_norm"},
                **GGUF_EXPERTS,
                "post_norm": "post_attention_norm.weight",
            }
        ),
        read=EXPERT_KEYS,
    ),
)
