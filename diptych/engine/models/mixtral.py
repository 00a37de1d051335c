"""Mixtral: Mistral with experts. Its GGUF files are of llama's architecture (llama.py)."""

from __future__ import annotations

from types import MappingProxyType

from diptych.engine.models.config_fields import llama_shape
from diptych.engine.models.family import LLAMA_ATTENTION, LLAMA_NORMS, Config, Family
from diptych.engine.models.mistral import MISTRAL_DEFAULTS
from diptych.engine.models.moe import with_experts
from diptych.engine.models.shape import ExpertsShape, ModelShape

_DEFAULTS = {
    **MISTRAL_DEFAULTS,
    "rms_norm_eps": 1e-5,
    "sliding_window": None,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
}
_LAYER = MappingProxyType(
    {
        **LLAMA_NORMS,
        **LLAMA_ATTENTION,
        "router": "block_sparse_moe.gate.weight",
        "experts.*.gate": "block_sparse_moe.experts.{}.w1.weight",
        "experts.*.up": "block_sparse_moe.experts.{}.w3.weight",
        "experts.*.down": "block_sparse_moe.experts.{}.w2.weight",
    }
)


def _shape(config: Config, tied: bool) -> ModelShape:
    experts = ExpertsShape(
        num_experts=config["num_local_experts"],
        experts_per_token=config["num_experts_per_tok"],
        intermediate_size=config["intermediate_size"],
        normalise=True,
    )
    shape = llama_shape(config, tied)
    return with_experts(shape, experts, [True] * shape.num_layers)


FAMILIES = (Family("mixtral", _DEFAULTS, _shape, layer=_LAYER, rope_theta=1_000_000.0, window="every_layer"),)
