"""Tiny models of the dense families as GGUF files, in the way of llama.cpp's converter.

Tensor names are those that the `gguf` package maps transformers' to.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch

from tests.diptych.engine.models.family_models import (
    GEMMA2,
    GRANITE,
    LINEAR,
    LLAMA3,
    PLAIN,
    WIDE,
    YARN,
    longrope,
)
from tests.diptych.engine.weights.gguf_files import add_value, finish, interleaved

Metadata = Mapping[str, object]
_FULL, _SLIDING = "full_attention", "sliding_attention"
_TYPES = [_SLIDING, _SLIDING, _SLIDING, _FULL]


@dataclass(frozen=True)
class Twin:
    """A case: its architecture, and how its converter writes it."""

    model_type: str
    architecture: str
    fields: dict[str, Any] = field(default_factory=dict)
    """Fields of transformers' config beside `SIZES`."""
    metadata: Callable[[Any], Metadata] = lambda config: {}
    """Keys below the architecture's prefix, beside those that all have."""
    permuted: bool = False
    """True if the converter makes neighbours of the lanes that the rotation pairs."""
    less_one: bool = False
    """True if norms are stored less one in the folder, and as they are in the file."""


def _caps(config: Any) -> Metadata:
    return {
        "attn_logit_softcapping": config.attn_logit_softcapping,
        "final_logit_softcapping": config.final_logit_softcapping,
        "attention.sliding_window": config.sliding_window,
    }


def _scales(config: Any) -> Metadata:
    return {
        "attention.scale": config.attention_multiplier,
        "embedding_scale": config.embedding_multiplier,
        "residual_scale": config.residual_multiplier,
        "logit_scale": config.logits_scaling,
    }


def _window(config: Any) -> Metadata:
    return {"attention.sliding_window": config.sliding_window}


def _half(config: Any) -> Metadata:
    partial = config.rope_parameters["partial_rotary_factor"]
    return {"rope.dimension_count": int(head_dim_of(config) * partial)}


TWINS: dict[str, Twin] = {
    "gemma": Twin("gemma", "gemma", WIDE, less_one=True),
    "gemma2": Twin(
        "gemma2",
        "gemma2",
        {
            **GEMMA2,
            "query_pre_attn_scalar": 40,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 3.0,
        },
        _caps,
        less_one=True,
    ),
    "gemma3": Twin(
        "gemma3_text",
        "gemma3",
        {**GEMMA2, "num_hidden_layers": 7, "query_pre_attn_scalar": 40},
        _window,
        less_one=True,
    ),
    "gemma3-linear": Twin(
        "gemma3_text",
        "gemma3",
        {
            **GEMMA2,
            "num_hidden_layers": 7,
            "query_pre_attn_scalar": 40,
            "rope_parameters": {_FULL: {**LINEAR, "rope_theta": 1e6}, _SLIDING: PLAIN},
        },
        lambda config: {
            **_window(config),
            "rope.freq_base": 1e6,
            "rope.scaling.type": "linear",
            "rope.scaling.factor": 2.0,
        },
        less_one=True,
    ),
    "phi3": Twin("phi3", "phi3", {"sliding_window": 19}, _window),
    "phi3-longrope": Twin(
        "phi3",
        "phi3",
        {
            "num_attention_heads": 3,
            "num_key_value_heads": 1,
            "original_max_position_embeddings": 32,
            "rope_parameters": longrope(12, partial_rotary_factor=0.75),
        },
        lambda config: {
            "rope.dimension_count": 24,
            "rope.scaling.original_context_length": 32,
            "rope.scaling.attn_factor": float(np.sqrt(1 + np.log(512 / 32) / np.log(32))),
        },
    ),
    "granite": Twin("granite", "granite", GRANITE, _scales, permuted=True),
    "smollm3": Twin("smollm3", "smollm3", {}, permuted=True),
    "olmo2": Twin("olmo2", "olmo2"),
    "olmo3": Twin(
        "olmo3",
        "olmo2",
        {
            "sliding_window": 19,
            "layer_types": _TYPES,
            "rope_parameters": {_FULL: YARN, _SLIDING: PLAIN},
        },
        lambda config: {
            **_window(config),
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": 4.0,
            "rope.scaling.original_context_length": 32,
        },
    ),
    "exaone4": Twin("exaone4", "exaone4", {"sliding_window": 19, "rope_parameters": LLAMA3}, _window),
    "exaone4-full": Twin("exaone4", "exaone4", {"sliding_window": None, "layer_types": [_FULL] * 4}),
    "glm4": Twin("glm4", "glm4", WIDE, _half),
    "cohere": Twin("cohere", "command-r", {}, lambda config: {"logit_scale": config.logit_scale}),
    "cohere2": Twin(
        "cohere2",
        "cohere2",
        {"sliding_window": 19},
        lambda config: {**_window(config), "logit_scale": config.logit_scale},
    ),
    "starcoder2": Twin("starcoder2", "starcoder2"),
    "stablelm": Twin("stablelm", "stablelm", {"use_qkv_bias": True}, _half),
    "stablelm-parallel": Twin(
        "stablelm",
        "stablelm",
        {"use_parallel_residual": True},
        lambda config: {**_half(config), "use_parallel_residual": True},
    ),
    "nemotron": Twin("nemotron", "nemotron", WIDE, _half, less_one=True),
    "arcee": Twin("arcee", "arcee", permuted=True),
    "hunyuan": Twin("hunyuan_v1_dense", "hunyuan-dense", {**WIDE, "rope_parameters": PLAIN}),
    "seed-oss": Twin("seed_oss", "seed_oss", WIDE),
    "ernie4.5": Twin("ernie4_5", "ernie4_5", WIDE),
    "ministral3": Twin(
        "ministral3",
        "mistral3",
        {
            **WIDE,
            "rope_parameters": {
                **YARN,
                "attention_factor": 1.0,
                "llama_4_scaling_beta": 0.5,
                "original_max_position_embeddings": 20,
            },
        },
        lambda config: {
            "attention.temperature_scale": 0.5,
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": 4.0,
            "rope.scaling.original_context_length": 20,
            "rope.scaling.yarn_log_multiplier": 1.0,
        },
        permuted=True,
    ),
}


def head_dim_of(config: Any) -> int:
    """Return the width of a head."""
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def write_twin(oracle: Any, path: Path, twin: Twin, kind: gguf.GGMLQuantizationType | None = None) -> None:
    """Write transformers' model as a GGUF file, its matrices quantised as `kind` where given."""
    config = oracle.config
    writer = gguf.GGUFWriter(path, twin.architecture)
    write_metadata(writer, config, twin)
    _write_rope_factors(writer, oracle)
    add_parameters(writer, config, twin, oracle.named_parameters(), kind)
    finish(writer)


def add_parameters(
    writer: gguf.GGUFWriter,
    config: Any,
    twin: Twin,
    parameters: Iterable[tuple[str, Any]],
    kind: gguf.GGMLQuantizationType | None = None,
) -> None:
    """Add the parameters of a text model, by transformers' names."""
    names = gguf.get_tensor_name_map(
        next(arch for arch, name in gguf.MODEL_ARCH_NAMES.items() if name == twin.architecture),
        config.num_hidden_layers,
    )
    for name, parameter in parameters:
        array = parameter.detach().numpy()
        stored = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert stored is not None, name
        if twin.less_one and name.endswith("norm.weight"):
            array = array + 1
        if twin.permuted and ("q_proj" in name or "k_proj" in name):
            heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
            array = interleaved(array, heads)
        if kind is not None and array.ndim == 2:
            writer.add_tensor(stored, gguf.quants.quantize(array, kind), raw_dtype=kind)
        else:
            writer.add_tensor(stored, np.ascontiguousarray(array))


def write_metadata(writer: gguf.GGUFWriter, config: Any, twin: Twin) -> None:
    """Add the keys of a text model."""
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(head_dim_of(config))
    writer.add_value_length(head_dim_of(config))
    for epsilon in ("norm_epsilon", "layer_norm_eps", "norm_eps"):
        if hasattr(config, epsilon):
            writer.add_layer_norm_eps(getattr(config, epsilon))
    if hasattr(config, "rms_norm_eps"):
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    metadata = dict(twin.metadata(config))
    rope = config.rope_parameters.get(_FULL, config.rope_parameters)
    metadata.setdefault("rope.freq_base", float(rope["rope_theta"]))
    for key, value in metadata.items():
        add_value(writer, f"{twin.architecture}.{key}", value)


def _write_rope_factors(writer: gguf.GGUFWriter, oracle: Any) -> None:
    rope = oracle.config.rope_parameters
    if rope.get("rope_type") == "llama3":
        inverse = oracle.model.rotary_emb.inv_freq
        plain = 1.0 / 10000.0 ** (torch.arange(len(inverse)) / len(inverse))
        writer.add_tensor("rope_freqs.weight", (plain / inverse).float().numpy())
    if rope.get("rope_type") == "longrope":
        for key in ("long", "short"):
            writer.add_tensor(f"rope_factors_{key}.weight", np.array(rope[f"{key}_factor"], np.float32))
