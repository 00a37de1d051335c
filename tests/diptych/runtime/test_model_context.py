"""Context length: from a folder and from a GGUF file, YaRN's product, and `--max-model-len` below it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from diptych.engine.models.shape import RopeScaling
from diptych.engine.weights.hf_config import resolve_config, shape_from_config
from diptych.runtime.model_context import (
    ContextTooLong,
    check_max_model_len,
    folder_context,
    gguf_context,
    limited_context,
)

YARN = {"type": "yarn", "factor": 4.0}


@pytest.mark.parametrize(
    ("changes", "context"),
    [
        ({}, 64),
        ({"rope_scaling": YARN}, 256),
        ({"rope_scaling": {**YARN, "original_max_position_embeddings": 32}}, 128),
        ({"rope_scaling": {**YARN, "original_max_position_embeddings": 16}}, 64),  # the product already
        ({"rope_scaling": {**YARN, "original_max_position_embeddings": 8}}, 64),
        ({"rope_scaling": {**YARN, "factor": 2.5}}, 160),
        ({"rope_scaling": YARN, "original_max_position_embeddings": 48}, 192),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 4, "rope_theta": 1e4}}, 256),
        ({"rope_scaling": {"rope_type": "linear", "factor": 4.0}}, 64),
        (
            {
                "rope_scaling": {
                    "rope_type": "llama3",
                    "factor": 8.0,
                    "low_freq_factor": 1.0,
                    "high_freq_factor": 4.0,
                    "original_max_position_embeddings": 32,
                }
            },
            64,
        ),
    ],
)
def test_gateway_and_engine_read_one_context_from_a_folder(changes: dict[str, Any], context: int) -> None:
    config = {"model_type": "qwen2", "max_position_embeddings": 64, **changes}
    assert folder_context(config) == context
    assert shape_from_config(resolve_config(config), tied=False).max_context == context


def test_context_of_gguf_metadata_is_the_product_of_yarn() -> None:
    metadata = {
        "general.architecture": "qwen2",
        "qwen2.context_length": 64,
        "qwen2.rope.scaling.type": "yarn",
        "qwen2.rope.scaling.factor": 4.0,
        "qwen2.rope.scaling.original_context_length": 64,
    }
    assert gguf_context(metadata) == RopeScaling("yarn", 4.0, 64).stretched_context(64) == 256
    assert gguf_context({**metadata, "qwen2.rope.scaling.type": "linear"}) == 64
    assert gguf_context({**metadata, "qwen2.rope.scaling.factor": "4"}) == 64, "the engine refuses it by name"
    assert gguf_context({}) is None


def test_max_model_len_lowers_the_context_and_is_refused_above_it(tmp_path: Path) -> None:
    assert limited_context(256, None) == limited_context(256, 256) == 256
    assert limited_context(256, 100) == 100
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "qwen2", "max_position_embeddings": 64, "rope_scaling": YARN})
    )
    check_max_model_len(tmp_path, 256)
    with pytest.raises(ContextTooLong, match="--max-model-len 257: the model's files say that it reads 256"):
        check_max_model_len(tmp_path, 257)
