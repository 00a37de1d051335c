"""LFM2: short convolutions in most layers, attention with norms of heads in some."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from diptych.engine.models.config_fields import llama_shape, unreadable
from diptych.engine.models.family import (
    GGUF_LAYER,
    GGUF_MODEL,
    LLAMA_ATTENTION,
    LLAMA_MODEL,
    Config,
    Family,
    GgufFamily,
    GgufMetadata,
    Names,
    Stored,
)
from diptych.engine.models.recurrent import ShortConvShape
from diptych.engine.models.shape import BadModelFile, LayerShape, ModelShape

LFM2_DEFAULTS = {
    "vocab_size": 65536,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": None,
    "max_position_embeddings": 128_000,
    "norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "eos_token_id": 2,
    "conv_bias": False,
    "conv_L_cache": 3,
    "layer_types": None,
}
"""Defaults of LFM2 and LFM2-MoE."""
_DEFAULTS = {
    **LFM2_DEFAULTS,
    "hidden_size": 2560,
    "intermediate_size": 12288,
    "block_multiple_of": 256,
    "block_ffn_dim_multiplier": 1.0,
    "block_auto_adjust_ff_dim": True,
    "full_attn_idxs": None,
}
LFM2_LAYER: Names = {
    **LLAMA_ATTENTION,
    "o": "self_attn.out_proj.weight",
    "q_norm": "self_attn.q_layernorm.weight",
    "k_norm": "self_attn.k_layernorm.weight",
    "input_norm": "operator_norm.weight",
    "post_norm": "ffn_norm.weight",
    "gate": "feed_forward.w1.weight",
    "up": "feed_forward.w3.weight",
    "down": "feed_forward.w2.weight",
    "recurrent.in_proj": "conv.in_proj.weight",
    "recurrent.in_proj_bias": "conv.in_proj.bias",
    "recurrent.conv": "conv.conv.weight",
    "recurrent.conv_bias": "conv.conv.bias",
    "recurrent.out_proj": "conv.out_proj.weight",
    "recurrent.out_proj_bias": "conv.out_proj.bias",
}
LFM2_MODEL: Names = {**LLAMA_MODEL, "final_norm": "model.embedding_norm.weight"}


def resolve_names(resolved: dict[str, Any]) -> None:
    """Give fields of LFM2 and LFM2-MoE the names that other families have."""
    resolved["hidden_act"] = "silu"
    resolved["rms_norm_eps"] = float(resolved["norm_eps"])
    resolved["tie_word_embeddings"] = resolved.get("tie_embedding", resolved["tie_word_embeddings"])


def _resolve(resolved: dict[str, Any]) -> None:
    """Fill in the layers' kinds and what older files name differently."""
    resolve_names(resolved)
    resolved["intermediate_size"] = resolved.get("block_ff_dim", resolved["intermediate_size"])
    if resolved["layer_types"] is None:
        layers = range(resolved["num_hidden_layers"])
        full = resolved["full_attn_idxs"]
        attends = set(layers if full is None else full)
        resolved["layer_types"] = ["full_attention" if one in attends else "conv" for one in layers]


def _inner(config: Config) -> int:
    """Return the width of feed-forwards: two thirds of the given one, up to a whole multiple."""
    inner: int = config["intermediate_size"]
    if not config["block_auto_adjust_ff_dim"]:
        return inner
    inner = int(2 * inner / 3)
    if config["block_ffn_dim_multiplier"] is None:
        return inner
    step: int = config["block_multiple_of"]
    if step < 1:
        raise unreadable(f"block_multiple_of is {step}")
    return -(-int(config["block_ffn_dim_multiplier"] * inner) // step) * step


def _conv(config: Config) -> LayerShape:
    width, taps = config["hidden_size"], config["conv_L_cache"]
    return LayerShape(attention=False, recurrent=ShortConvShape(width, taps, config["conv_bias"]))


def _shape(config: Config, tied: bool) -> ModelShape:
    return llama_shape(config, tied, qk_norm="head", intermediate_size=_inner(config))


LAYER_KINDS: Mapping[str, Any] = {"conv": _conv}
FAMILIES = (
    Family(
        "lfm2",
        _DEFAULTS,
        _shape,
        layer=LFM2_LAYER,
        model=LFM2_MODEL,
        rope_theta=1_000_000.0,
        resolve=_resolve,
        layer_kinds=LAYER_KINDS,
    ),
)

_KV_HEADS, _TAPS = "attention.head_count_kv", "shortconv.l_cache"
_GGUF_LAYER: Names = {
    **GGUF_LAYER,
    "recurrent.in_proj": "shortconv.in_proj.weight",
    "recurrent.conv": Stored("shortconv.conv.weight", make=lambda taps, _, __: taps.unsqueeze(1)),
    "recurrent.out_proj": "shortconv.out_proj.weight",
}


def _gguf(metadata: GgufMetadata, shape: ModelShape) -> ModelShape:
    """Return the shape with convolutions in the layers that the file gives no KV heads."""
    heads = metadata.integers(_KV_HEADS) or (shape.num_kv_heads,) * shape.num_layers
    if len(heads) != shape.num_layers:
        raise BadModelFile(
            f"metadata {metadata.key(_KV_HEADS)} names {len(heads)} of {shape.num_layers} layers"
        )
    taps = metadata.size(_TAPS)
    conv = LayerShape(attention=False, recurrent=ShortConvShape(shape.hidden_size, taps))
    return replace(shape, qk_norm="head", layers=tuple(LayerShape() if one else conv for one in heads))


GGUF_FAMILIES = (
    GgufFamily(
        "lfm2",
        _gguf,
        layer=_GGUF_LAYER,
        model={**GGUF_MODEL, "final_norm": "token_embd_norm.weight"},
        read=frozenset({_KV_HEADS, _TAPS}),
    ),
)
