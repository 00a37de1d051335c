"""Qwen3-30B-A3B: its shape, and a folder of it with random weights."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from diptych.engine.models.shape import ExpertsShape, LayerShape, ModelShape
from lab.gpu.llama_folder import (
    Sizes,
    attention_sizes,
    decoder_config,
    outer_sizes,
    random_tensor,
    write_folder,
)
from lab.gpu.model_step import tiny
from lab.gpu.random_model import QWEN3_8B

QWEN3_30B_A3B = replace(
    QWEN3_8B, family="qwen3_moe", hidden_size=2048, num_heads=32, num_kv_heads=4,
    layers=(LayerShape(experts=True),) * 48,
    experts=ExpertsShape(128, 8, 768, routing="softmax_then_topk", normalise=True),
)  # fmt: skip
_SPARE_BYTES = 6 << 30


def tiny_moe() -> ModelShape:
    """Return a small shape of the kind."""
    return replace(tiny(QWEN3_30B_A3B), experts=ExpertsShape(4, 2, 16, normalise=True))


def fewer_layers(shape: ModelShape, folder: Path) -> ModelShape:
    """Return the shape with as many layers as the disk of `folder` has room for: 61 GB are all."""
    room = shutil.disk_usage(folder).free - _SPARE_BYTES
    layer = 2 * sum(rows * columns for rows, columns in filter(_is_matrix, _layer(shape).values()))
    return replace(shape, layers=shape.layers[: max(1, min(shape.num_layers, room // layer))])


def write_qwen_moe_folder(folder: Path, shape: ModelShape, device: torch.device, dtype: torch.dtype) -> Path:
    """Write config, a file for each layer, and a tokenizer. Needs transformers."""
    make = partial(random_tensor, device=device, dtype=dtype)
    return write_folder(folder, _config(shape), _shards(shape), make)


def _is_matrix(size: tuple[int, ...]) -> bool:
    return len(size) == 2


def _config(shape: ModelShape) -> dict[str, object]:
    experts = shape.experts
    assert experts is not None
    return decoder_config(shape, "Qwen3MoeForCausalLM", "qwen3_moe") | {
        "moe_intermediate_size": experts.intermediate_size,
        "num_experts": experts.num_experts,
        "num_experts_per_tok": experts.experts_per_token,
        "norm_topk_prob": experts.normalise,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "attention_bias": False,
    }


def _layer(shape: ModelShape) -> dict[str, tuple[int, ...]]:
    """Return the sizes of a layer's tensors, by their names below it."""
    experts, hidden = shape.experts, shape.hidden_size
    assert experts is not None
    sizes = attention_sizes(shape) | {
        "self_attn.q_norm": (shape.head_dim,),
        "self_attn.k_norm": (shape.head_dim,),
        "mlp.gate": (experts.num_experts, hidden),
    }
    for number in range(experts.num_experts):
        sizes |= {
            f"mlp.experts.{number}.gate_proj": (experts.intermediate_size, hidden),
            f"mlp.experts.{number}.up_proj": (experts.intermediate_size, hidden),
            f"mlp.experts.{number}.down_proj": (hidden, experts.intermediate_size),
        }
    return sizes


def _shards(shape: ModelShape) -> Iterator[Sizes]:
    for number in range(shape.num_layers):
        yield {f"model.layers.{number}.{name}.weight": size for name, size in _layer(shape).items()}
    yield outer_sizes(shape)
