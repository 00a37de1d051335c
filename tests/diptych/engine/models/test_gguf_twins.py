"""GGUF files of every dense family that the `gguf` package names, against transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from transformers import CONFIG_MAPPING

from diptych.engine.loaded_model import load_model
from diptych.engine.models.shape import UnsupportedModel
from diptych.engine.weights.checkpoint import read_checkpoint
from diptych.model_families import GGUF_ARCHITECTURES
from kernels.quantised_linear import BlockMatrix, dequantise
from tests.diptych.engine.models.family_models import SIZES, TEXT, Stepper, oracle_logits, oracle_of, text_of
from tests.diptych.engine.models.gguf_twins import TWINS, Twin, write_twin

ELSEWHERE = {
    *("llama", "mistral", "qwen2", "qwen3"),
    *("deepseek2", "glm4moe", "gpt-oss", "granitemoe", "olmoe", "qwen2moe", "qwen3moe"),
    *("qwen2vl", "qwen3vl", "lfm2"),
}
"""Architectures of weights/test_gguf_file.py, test_expert_gguf.py, test_lfm2.py and vision/test_mmproj.py."""


pytestmark = pytest.mark.usefixtures("one_thread")


def twin_of(name: str, **changes: Any) -> tuple[Twin, Any]:
    """Return a case and transformers' model, some sizes changed."""
    twin = TWINS[name]
    return twin, oracle_of(CONFIG_MAPPING[twin.model_type](**{**SIZES, **twin.fields, **changes}))


def test_every_architecture_has_a_twin() -> None:
    assert {twin.architecture for twin in TWINS.values()} == set(GGUF_ARCHITECTURES) - ELSEWHERE


@pytest.mark.parametrize("name", TWINS)
def test_logits_equal_transformers(name: str, tmp_path: Path) -> None:
    twin, oracle = twin_of(name)
    write_twin(oracle, tmp_path / "model.gguf", twin)
    model = load_model(tmp_path / "model.gguf", torch.float32, backend="torch")
    got = Stepper(model.backend, model.shape).logits(text_of(TEXT), 23)
    torch.testing.assert_close(got, oracle_logits(oracle, text_of(TEXT)), atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", ["phi3", "phi3-longrope", "glm4", "granite", "nemotron"])
def test_blocks_of_fused_and_reordered_matrices_are_kept(name: str, tmp_path: Path) -> None:
    twin, oracle = twin_of(name, intermediate_size=128, head_dim=32, num_attention_heads=3)
    write_twin(oracle, tmp_path / "model.gguf", twin, gguf.GGMLQuantizationType.Q8_0)
    kept, full = (read_checkpoint(tmp_path / "model.gguf", one).weights for one in ("gguf", "fp32"))
    for ours, theirs in zip(kept.layers, full.layers, strict=True):
        for field in ("q", "k", "v", "o", "gate", "up", "down"):
            matrix, numbers = getattr(ours, field), getattr(theirs, field)
            if matrix is None:
                assert numbers is None
                assert field == "gate"
                continue
            assert isinstance(matrix, BlockMatrix)
            assert torch.equal(dequantise(matrix), numbers)


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("phi3", "attn_logit_softcapping"),
        ("phi3", "logit_scale"),
        ("olmo2", "attention.scale"),
        ("gemma2", "rope.freq_base_swa"),
        ("exaone4", "attention.temperature_scale"),
    ],
)
def test_key_of_another_family_is_refused(name: str, key: str, tmp_path: Path) -> None:
    twin, oracle = twin_of(name)
    asked = Twin(
        **{**vars(twin), "metadata": lambda config: {**twin.metadata(config), key: 0.37}},
    )
    write_twin(oracle, tmp_path / "model.gguf", asked)
    with pytest.raises(UnsupportedModel, match=f"{twin.architecture}.{key} .* is not computed"):
        read_checkpoint(tmp_path / "model.gguf", "fp32")
