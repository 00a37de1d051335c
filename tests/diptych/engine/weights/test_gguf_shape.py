"""Metadata of GGUF files: what stretches the rotation, and what must be refused as it is not computed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from diptych.engine.models.rope import yarn_magnitude
from diptych.engine.models.shape import RopeScaling, UnsupportedModel
from diptych.engine.weights import BadModelFile
from diptych.engine.weights.checkpoint import read_checkpoint
from tests import bundled_oracle
from tests.diptych.engine.weights.gguf_files import LLAMA3, SIZES, logits, oracle_of, write

PAIRS = SIZES["hidden_size"] // SIZES["num_attention_heads"] // 2
YARN = {
    "rope.scaling.type": "yarn",
    "rope.scaling.factor": 4.0,
    "rope.scaling.original_context_length": 32,
}
HF_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
HF_LINEAR = {"rope_type": "linear", "factor": 4.0}
SHARPER = {"attention_factor": 1.5 * yarn_magnitude(4.0)}

SAME: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "linear": (HF_LINEAR, {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}),
    "linear is the default": (HF_LINEAR, {"rope.scaling.factor": 4.0}),
    "linear by its first name": (HF_LINEAR, {"rope.scale_linear": 4.0}),
    "zero is no factor": ({"rope_type": "default"}, {"rope.scaling.factor": 0.0}),
    "none": ({"rope_type": "default"}, {"rope.scaling.type": "none", "rope.scaling.factor": 4.0}),
    "yarn": (HF_YARN, YARN),
    "yarn's blend": (
        {**HF_YARN, "beta_fast": 8.0, "beta_slow": 2.0},
        {**YARN, "rope.scaling.yarn_beta_fast": 8.0, "rope.scaling.yarn_beta_slow": 2.0},
    ),
    "yarn's sharpness": ({**HF_YARN, **SHARPER}, {**YARN, "rope.scaling.attn_factor": 1.5}),
}


def llama(path: Path, metadata: dict[str, Any], tensors: dict[str, np.ndarray] | None = None) -> Path:
    write(oracle_of("llama"), path / "model.gguf", "llama", metadata=metadata, tensors=tensors)
    return path / "model.gguf"


@pytest.mark.parametrize("name", SAME)
def test_the_rotation_is_stretched_as_transformers_stretches_it(name: str, tmp_path: Path) -> None:
    theirs, ours = SAME[name]
    oracle, ids = oracle_of("llama", {"rope_theta": 10000.0, **theirs}), list(range(40))
    write(oracle, tmp_path / "model.gguf", "llama", metadata=ours)
    with torch.no_grad():
        expected = oracle(torch.tensor([ids])).logits[0, -1]
    torch.testing.assert_close(logits(tmp_path / "model.gguf", ids), expected, atol=1e-4, rtol=0)


def test_a_factor_stretches_what_the_files_own_factors_stretched(tmp_path: Path) -> None:
    factors = {"rope_freqs.weight": np.arange(1, PAIRS + 1)}
    path = llama(tmp_path, {"rope.scaling.type": "linear", "rope.scaling.factor": 2.0}, factors)
    expected = tuple(2.0 * factor for factor in range(1, PAIRS + 1))
    assert read_checkpoint(path, "fp32").shape.rotations[0].scaling == RopeScaling(
        "factors", factors=expected
    )


@pytest.mark.parametrize("length", [1, 3, 2 * PAIRS])
def test_factors_of_another_number_of_lanes_are_refused(length: int, tmp_path: Path) -> None:
    path = llama(tmp_path, {}, {"rope_freqs.weight": np.ones(length)})
    with pytest.raises(BadModelFile, match=rf"rope_freqs\.weight has {length} factors for {PAIRS} pairs"):
        read_checkpoint(path, "fp32")


def test_factors_that_are_no_divisors_are_refused(tmp_path: Path) -> None:
    path = llama(tmp_path, {}, {"rope_freqs.weight": np.zeros(PAIRS)})
    with pytest.raises(BadModelFile, match=r"rope_freqs\.weight"):
        read_checkpoint(path, "fp32")


def test_yarn_and_the_files_own_factors_together_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write(oracle_of("llama", LLAMA3), path, "llama", metadata=YARN)
    with pytest.raises(UnsupportedModel, match=r"yarn.*rope_freqs\.weight"):
        read_checkpoint(path, "fp32")


@pytest.mark.parametrize(
    "metadata",
    [
        {"attention.causal": False},
        {"attention.scale": 0.01},
        {"attention.sliding_window": [4, 0]},
        {"attention.sliding_window_pattern": 2},
        {"attention.head_count_kv": [2, 1]},
        {"expert_count": [2, 1]},
        {"expert_count": [2] * 40},
        {"attention.a_key_made_up_later": 1.0},
        {"logit_scale": 0.5},
        {"residual_scale": 0.5},
        {"final_logit_softcapping": 30.0},
        {"rope.freq_base_swa": 500.0},
        {"rope.scaling.alpha": 1000.0},
        {"rope.scaling.attn_factor": 1.5},
        {"rope.scaling.yarn_ext_factor": 0.5, **YARN},
        {"rope.scaling.yarn_attn_factor": 1.0, **YARN},
        {"rope.scaling.yarn_log_multiplier": 0.1, **YARN},
    ],
    ids=lambda metadata: next(iter(metadata)),
)
def test_what_is_not_computed_is_refused_by_its_key(metadata: dict[str, Any], tmp_path: Path) -> None:
    key = next(iter(metadata))
    with pytest.raises(UnsupportedModel, match=rf"llama\.{key}\b"):
        read_checkpoint(llama(tmp_path, metadata), "fp32")


@pytest.mark.parametrize("key", ["factor", "attn_factor", "yarn_beta_fast", "yarn_beta_slow"])
def test_numbers_that_nothing_can_be_divided_by_are_refused(key: str, tmp_path: Path) -> None:
    path = llama(tmp_path, {**YARN, f"rope.scaling.{key}": 0.0})
    with pytest.raises(BadModelFile, match=rf"llama\.rope\.scaling\.{key} .*positive"):
        read_checkpoint(path, "fp32")


def test_values_that_change_nothing_are_no_hindrance(tmp_path: Path) -> None:
    neutral: dict[str, Any] = {
        "attention.value_length": 16,
        "attention.causal": True,
        "attention.scale": 16**-0.5,
        "attention.max_alibi_bias": 0.0,
        "logit_scale": 1.0,
        "final_logit_softcapping": 0.0,
        "rope.dimension_count": 16,
        "rope.scaling.finetuned": True,
        "rope.scaling.yarn_ext_factor": 1.0,
        "rope.scaling.yarn_attn_factor": yarn_magnitude(4.0),
        "rope.scaling.yarn_log_multiplier": 0.0,
        "expert_count": 0,
        "vocab_size": 96,
        "tensor_data_layout": "Meta AI original pth",
    }
    [rotation] = read_checkpoint(llama(tmp_path, {**YARN, **neutral}), "fp32").shape.rotations
    assert rotation.scaling == RopeScaling("yarn", 4.0, 32)


def test_the_bundled_model_is_read() -> None:
    shape = read_checkpoint(bundled_oracle.path(), "gguf").shape
    assert (shape.family, shape.num_layers, shape.rotations[0].scaling) == ("llama", 30, None)
