"""OLMoE: experts, and norms over the whole width of queries and keys."""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType

from diptych.engine.models.config_fields import COMMON, llama_shape
from diptych.engine.models.family import GGUF_LAYER, LLAMA_LAYER, Config, Family, GgufFamily, GgufMetadata
from diptych.engine.models.moe import EXPERT_KEYS, EXPERT_MATRICES, GGUF_EXPERTS, gguf_experts, with_experts
from diptych.engine.models.shape import ExpertsShape, ModelShape

_DEFAULTS = {
    **COMMON,
    "vocab_size": 50304,
    "hidden_size": 2048,
    "intermediate_size": 2048,
    "num_hidden_layers": 16,
    "num_attention_heads": 16,
    "num_key_value_heads": None,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "eos_token_id": 50279,
    "clip_qkv": None,
    "num_experts": 64,
    "num_experts_per_tok": 8,
    "norm_topk_prob": False,
}


def _shape(config: Config, tied: bool) -> ModelShape:
    experts = ExpertsShape(
        num_experts=config["num_experts"],
        experts_per_token=config["num_experts_per_tok"],
        intermediate_size=config["intermediate_size"],
        normalise=config["norm_topk_prob"],
    )
    shape = llama_shape(config, tied, qk_norm="width")
    return with_experts(shape, experts, [True] * shape.num_layers)


def _gguf(metadata: GgufMetadata, shape: ModelShape) -> ModelShape:
    return gguf_experts(metadata, replace(shape, qk_norm="width"))


FAMILIES = (
    Family(
        "olmoe",
        _DEFAULTS,
        _shape,
        layer=MappingProxyType({**LLAMA_LAYER, **EXPERT_MATRICES}),
        neutral={"clip_qkv": (None,)},
    ),
)
GGUF_FAMILIES = (
    GgufFamily("olmoe", _gguf, layer=MappingProxyType({**GGUF_LAYER, **GGUF_EXPERTS}), read=EXPERT_KEYS),
)
