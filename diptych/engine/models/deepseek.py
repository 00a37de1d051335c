"""DeepSeek-V2 and V3 (and R1): attention over latents, dense layers first, experts with a shared one."""

from __future__ import annotations

import math
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import torch

from diptych.engine.models.config_fields import COMMON, llama_shape, unreadable
from diptych.engine.models.family import (
    GGUF_LAYER,
    LLAMA_FEED_FORWARD,
    LLAMA_NORMS,
    Config,
    Extent,
    Family,
    GgufFamily,
    GgufMetadata,
    Names,
    Stored,
)
from diptych.engine.models.glm4_moe import sigmoid_experts
from diptych.engine.models.moe import (
    EXPERT_KEYS,
    EXPERT_MATRICES,
    GGUF_EXPERTS,
    SHARED_EXPERT,
    gguf_experts,
    with_experts,
)
from diptych.engine.models.rope import yarn_magnitude
from diptych.engine.models.shape import ExpertsShape, LatentShape, ModelShape, UnsupportedModel

_COMMON = {
    **COMMON,
    "num_key_value_heads": None,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_shared_experts": 2,
}
_V2 = {
    **_COMMON,
    "vocab_size": 102400,
    "intermediate_size": 11008,
    "max_position_embeddings": 2048,
    "eos_token_id": 2,
    "first_k_dense_replace": 0,
    "n_group": None,
    "topk_group": None,
    "topk_method": "greedy",
    "n_routed_experts": 64,
    "num_experts_per_tok": None,
    "moe_intermediate_size": 1407,
    "routed_scaling_factor": 1.0,
}
_V3 = {
    **_COMMON,
    "vocab_size": 129280,
    "num_key_value_heads": 128,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "max_position_embeddings": 4096,
    "eos_token_id": 1,
    "first_k_dense_replace": 3,
    "n_group": 8,
    "topk_group": 4,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 2048,
    "routed_scaling_factor": 2.5,
    "norm_topk_prob": True,
    "rope_interleave": True,
}
_KV_B = Stored("self_attn.kv_b_proj.weight", ("k_b", "v"))
_ATTENTION: Names = MappingProxyType(
    {
        "q": "self_attn.q_proj.weight",
        "q_a": "self_attn.q_a_proj.weight",
        "q_a_bias": "self_attn.q_a_proj.bias",
        "q_a_norm": "self_attn.q_a_layernorm.weight",
        "q_b": "self_attn.q_b_proj.weight",
        "k": "self_attn.kv_a_proj_with_mqa.weight",
        "k_bias": "self_attn.kv_a_proj_with_mqa.bias",
        "latent_norm": "self_attn.kv_a_layernorm.weight",
        "k_b": _KV_B,
        "v": _KV_B,
        "o": "self_attn.o_proj.weight",
        "o_bias": "self_attn.o_proj.bias",
    }
)
_LAYER: Names = MappingProxyType(
    {
        **LLAMA_NORMS,
        **LLAMA_FEED_FORWARD,
        **EXPERT_MATRICES,
        **SHARED_EXPERT,
        **_ATTENTION,
    }
)


def _resolve(config: dict[str, Any]) -> None:
    config["head_dim"] = config["qk_rope_head_dim"]


def _shape(config: Config, tied: bool, experts: ExpertsShape) -> ModelShape:
    latent = LatentShape(
        rank=config["kv_lora_rank"],
        plain=config["qk_nope_head_dim"],
        value=config["v_head_dim"],
        query_rank=config["q_lora_rank"],
    )
    scale = (latent.plain + config["head_dim"]) ** -0.5 * _sharpening(config)
    shape = llama_shape(config, tied, num_kv_heads=1, latent=latent, attention_scale=scale)
    dense = config["first_k_dense_replace"]
    return with_experts(shape, experts, (layer >= dense for layer in range(shape.num_layers)))


def _sharpening(config: Config) -> float:
    """Return the factor of scores for contexts longer than the trained one (yarn with `mscale_all_dim`)."""
    rope = config["rope_parameters"]
    if rope["rope_type"] == "default" or not rope.get("mscale_all_dim"):
        return 1.0
    return yarn_magnitude(float(rope["factor"]), float(rope["mscale_all_dim"])) ** 2


def _v2(config: Config, tied: bool) -> ModelShape:
    if config["num_experts_per_tok"] is None:
        raise unreadable("num_experts_per_tok is missing")
    grouped = config["topk_method"] == "group_limited_greedy"
    if config["topk_method"] not in ("greedy", "group_limited_greedy"):
        raise UnsupportedModel(f"topk_method {config['topk_method']!r} is not computed")
    experts = ExpertsShape(
        num_experts=config["n_routed_experts"],
        experts_per_token=config["num_experts_per_tok"],
        intermediate_size=config["moe_intermediate_size"],
        scale=float(config["routed_scaling_factor"]),
        groups=(config["n_group"] or 1) if grouped else 1,
        groups_per_token=(config["topk_group"] or 1) if grouped else 1,
        shared_size=config["moe_intermediate_size"] * config["n_shared_experts"],
    )
    return _shape(config, tied, experts)


def _v3(config: Config, tied: bool) -> ModelShape:
    return _shape(config, tied, sigmoid_experts(config))


_V2_FAMILY = Family(
    "deepseek_v2",
    _V2,
    _v2,
    layer=_LAYER,
    interleaved=True,
    resolve=_resolve,
    neutral={
        # What its own code does with true is another thing than transformers does.
        "norm_topk_prob": (False, None),
        "scoring_func": ("softmax",),
        "moe_layer_freq": (1,),
        "mlp_bias": (False,),
    },
    layers_behind="num_nextn_predict_layers",
)


def _keys(tensor: torch.Tensor, _: str, __: ModelShape) -> torch.Tensor:
    """Return `[heads * plain, rank]` of keys' matrices `[heads, rank, plain]`."""
    return tensor.transpose(1, 2).flatten(0, 1)


def _values(tensor: torch.Tensor, _: str, __: ModelShape) -> torch.Tensor:
    return tensor.flatten(0, 1)


def _of_heads(field: str, part: Extent, shape: ModelShape) -> Extent:
    """Return the heads whose keys or values some rows are; parts have whole heads."""
    rows, latent = part[0], shape.latent
    if rows is None or latent is None:
        return part
    width = latent.plain if field == "k_b" else latent.value
    return range(rows.start // width, -(-rows.stop // width)), None


def _gguf(metadata: GgufMetadata, shape: ModelShape) -> ModelShape:
    rotated, width = metadata.size("rope.dimension_count"), metadata.size("attention.key_length_mla")
    latent = LatentShape(
        rank=metadata.size("attention.kv_lora_rank"),
        plain=width - rotated,
        value=metadata.size("attention.value_length_mla"),
        query_rank=metadata.integer("attention.q_lora_rank"),
    )
    (rotation,) = shape.rotations
    scale, scaling, sharper = (
        width**-0.5,
        rotation.scaling,
        metadata.number("rope.scaling.yarn_log_multiplier"),
    )
    if scaling is not None and scaling.kind == "yarn" and sharper:
        # The converter takes for granted that both of the config's mscales are one.
        scale *= (sharper * math.log(scaling.factor) + 1.0) ** 2
        scaling = replace(scaling, attention_factor=1.0)
    shape = replace(
        shape,
        head_dim=rotated,
        num_kv_heads=1,
        latent=latent,
        attention_scale=scale,
        rotations=(replace(rotation, scaling=scaling),),
    )
    sigmoid = metadata.integer("expert_gating_func") == 2
    if metadata.integer("expert_gating_func") not in (None, 0, 1, 2):
        raise UnsupportedModel(
            f"metadata {metadata.key('expert_gating_func')}: softmax and sigmoids are computed"
        )
    dense = metadata.integer("leading_dense_block_count") or 0
    return gguf_experts(
        metadata,
        shape,
        routing="sigmoid" if sigmoid else "softmax_then_topk",
        normalise=bool(metadata.get("expert_weights_norm")),
        scale=metadata.number("expert_weights_scale") or 1.0,
        correction_bias=metadata.has(f"blk.{dense}.exp_probs_b.bias"),
        shared_size=metadata.size("expert_feed_forward_length")
        * (metadata.integer("expert_shared_count") or 0),
        groups=metadata.integer("expert_group_count") or 1,
        groups_per_token=metadata.integer("expert_group_used_count") or 1,
        group_score="best_two" if sigmoid else "best",
    )


GGUF_FAMILIES = (
    GgufFamily(
        "deepseek2",
        _gguf,
        layer=MappingProxyType(
            {
                **GGUF_LAYER,
                **GGUF_EXPERTS,
                "q_a": "attn_q_a.weight",
                "q_a_norm": "attn_q_a_norm.weight",
                "q_b": "attn_q_b.weight",
                "k": "attn_kv_a_mqa.weight",
                "latent_norm": "attn_kv_a_norm.weight",
                "k_b": Stored("attn_k_b.weight", make=_keys, made_of=_of_heads),
                "v": Stored("attn_v_b.weight", make=_values, made_of=_of_heads),
            }
        ),
        interleaved=True,
        read=EXPERT_KEYS
        | {
            *("attention.kv_lora_rank", "attention.q_lora_rank", "attention.key_length_mla"),
            *("attention.value_length_mla", "rope.scaling.yarn_log_multiplier"),
        },
    ),
)
FAMILIES = (
    _V2_FAMILY,
    replace(
        _V2_FAMILY,
        name="deepseek_v3",
        defaults=_V3,
        shape=_v3,
        neutral={
            "scoring_func": ("sigmoid",),
            "moe_layer_freq": (1,),
            "topk_method": ("noaux_tc",),
            "rope_interleave": (True,),
            "mlp_bias": (False,),
        },
    ),
)
