"""Qwen3: Llama with a norm over each head of queries and keys."""

from __future__ import annotations

from dataclasses import replace

from diptych.engine.models.config_fields import llama_shape
from diptych.engine.models.family import Config, Family, GgufFamily, GgufMetadata
from diptych.engine.models.qwen2 import QWEN2_DEFAULTS
from diptych.engine.models.shape import ModelShape


def _shape(config: Config, tied: bool) -> ModelShape:
    return llama_shape(config, tied, qk_norm="head")


def _gguf(metadata: GgufMetadata, shape: ModelShape) -> ModelShape:
    return replace(shape, qk_norm="head")


FAMILIES = (Family("qwen3", {**QWEN2_DEFAULTS, "head_dim": 128}, _shape, window="layer_types"),)
GGUF_FAMILIES = (GgufFamily("qwen3", _gguf),)
