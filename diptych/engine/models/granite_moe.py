"""Granite-MoE: Granite's scales, and experts whose weights are the softmax of the chosen logits."""

from __future__ import annotations

from types import MappingProxyType

from diptych.engine.models.family import (
    GGUF_LAYER,
    LLAMA_ATTENTION,
    LLAMA_NORMS,
    Config,
    Family,
    GgufFamily,
    GgufMetadata,
)
from diptych.engine.models.granite import (
    GRANITE_EXPERTS,
    GRANITE_KEYS,
    GRANITE_SCALES,
    granite_experts,
    granite_gguf,
    granite_shape,
)
from diptych.engine.models.llama import LLAMA_DEFAULTS
from diptych.engine.models.moe import EXPERT_KEYS, GGUF_EXPERTS, gguf_experts, with_experts
from diptych.engine.models.shape import ModelShape

_DEFAULTS = {**LLAMA_DEFAULTS, **GRANITE_SCALES, "num_local_experts": 8, "num_experts_per_tok": 2}
_LAYER = MappingProxyType({**LLAMA_NORMS, **LLAMA_ATTENTION, **GRANITE_EXPERTS})


def _shape(config: Config, tied: bool) -> ModelShape:
    shape = granite_shape(config, tied)
    return with_experts(shape, granite_experts(config), [True] * shape.num_layers)


def _gguf(metadata: GgufMetadata, shape: ModelShape) -> ModelShape:
    return gguf_experts(metadata, granite_gguf(metadata, shape), routing="topk_then_softmax")


FAMILIES = (Family("granitemoe", _DEFAULTS, _shape, layer=_LAYER),)
GGUF_FAMILIES = (
    GgufFamily(
        "granitemoe",
        _gguf,
        layer=MappingProxyType({**GGUF_LAYER, **GGUF_EXPERTS}),
        interleaved=True,
        read=EXPERT_KEYS | GRANITE_KEYS,
    ),
)
