"""Text models inside models with images, against transformers: both spellings of their tensors' names."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForImageTextToText,
    Gemma3Config,
    Gemma3TextConfig,
    Ministral3Config,
    Mistral3Config,
    MistralConfig,
    PixtralVisionConfig,
    SiglipVisionConfig,
)

from diptych.engine.loaded_model import load_model
from diptych.engine.models.config_fields import resolve_config, shape_from_config
from diptych.engine.models.shape import UnsupportedModel
from diptych.engine.weights import BadModelFile
from diptych.engine.weights.checkpoint import read_checkpoint
from diptych.runtime.model_context import folder_context
from diptych.runtime.tokenizer.hf_tokenizer import read
from tests.diptych.engine.models.family_models import (
    CASES,
    SIZES,
    TEXT,
    WIDE,
    Stepper,
    oracle_logits,
    randomise,
    text_of,
)
from tests.diptych.engine.models.published_configs import PUBLISHED
from tests.diptych.engine.weights.quantised_folders import change
from tests.diptych.runtime.tokenizer.small_models import byte_level

VISION: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
TEXT_MODELS: dict[str, Callable[[], Any]] = {
    "gemma3": lambda: Gemma3Config(
        text_config=Gemma3TextConfig(**{**SIZES, **CASES["gemma3"][1]}),
        vision_config=SiglipVisionConfig(**VISION),
        mm_tokens_per_image=4,
    ),
    "mistral3": lambda: Mistral3Config(
        text_config=MistralConfig(**SIZES, **WIDE, sliding_window=None),
        vision_config=PixtralVisionConfig(**VISION, head_dim=16),
        tie_word_embeddings=False,
    ),
    "ministral3": lambda: Mistral3Config(
        text_config=Ministral3Config(**{**SIZES, **CASES["ministral3"][1]}),
        vision_config=PixtralVisionConfig(**VISION, head_dim=16),
        tie_word_embeddings=True,
    ),
}


@pytest.fixture(params=TEXT_MODELS)
def wrapped(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Any, Path]:
    """A model with images, transformers' own and its folder."""
    torch.manual_seed(11)
    config = TEXT_MODELS[request.param]()
    oracle = AutoModelForImageTextToText.from_config(config, attn_implementation="eager").eval().float()
    randomise(oracle)
    oracle.save_pretrained(tmp_path)
    return oracle, tmp_path


def test_text_model_equals_transformers(wrapped: tuple[Any, Path]) -> None:
    oracle, folder = wrapped
    expected = oracle_logits(oracle, text_of(TEXT))
    for respelled in (False, True):
        if respelled:
            change(folder, respell)
        model = load_model(folder, torch.float32, backend="torch")
        got = Stepper(model.backend, model.shape).logits(text_of(TEXT), 23)
        torch.testing.assert_close(got, expected, atol=1e-4, rtol=0)


def test_context_is_the_text_models(wrapped: tuple[Any, Path]) -> None:
    assert (
        folder_context(wrapped[0].config.to_dict()) == read_checkpoint(wrapped[1], "fp32").shape.max_context
    )


def test_missing_text_tensor_is_named(wrapped: tuple[Any, Path]) -> None:
    def edit(tensors: dict[str, torch.Tensor]) -> None:
        tensors.pop(next(name for name in tensors if "layers.1.mlp.up_proj" in name and "language" in name))

    change(wrapped[1], edit)
    with pytest.raises(BadModelFile, match=r"layers\.1\.mlp\.up_proj\.weight is missing"):
        read_checkpoint(wrapped[1], "fp32")


def test_text_tensor_too_many_is_named(wrapped: tuple[Any, Path]) -> None:
    def edit(tensors: dict[str, torch.Tensor]) -> None:
        layer = next(name for name in tensors if name.endswith("layers.1.mlp.up_proj.weight"))
        tensors[layer.replace("up_proj.weight", "up_proj.bias")] = torch.ones(136)

    change(wrapped[1], edit)
    with pytest.raises(UnsupportedModel, match=r"layers\.1\.mlp\.up_proj\.bias is not computed"):
        read_checkpoint(wrapped[1], "fp32")


def respell(tensors: dict[str, torch.Tensor]) -> None:
    """Give a folder's tensors the names of the other spelling."""
    new, old = "model.language_model.", "language_model.model."
    for name in list(tensors):
        if name.startswith(new):
            tensors[old + name.removeprefix(new)] = tensors.pop(name)
        elif name.startswith(old):
            tensors[new + name.removeprefix(old)] = tensors.pop(name)
        elif name == "lm_head.weight":
            tensors["language_model.lm_head.weight"] = tensors.pop(name)
        elif name == "language_model.lm_head.weight":
            tensors["lm_head.weight"] = tensors.pop(name)


def test_gateway_reads_vocabulary_and_ends_of_the_text_model(wrapped: tuple[Any, Path]) -> None:
    folder = wrapped[1]
    byte_level().save(str(folder / "tokenizer.json"))
    for name in ("generation_config.json", "tokenizer_config.json"):
        (folder / name).unlink(missing_ok=True)
    source = read(folder)
    assert source.vocab_size == SIZES["vocab_size"]
    assert source.max_context == read_checkpoint(folder, "fp32").shape.max_context
    assert SIZES["eos_token_id"] in source.eos_token_ids


def test_gateway_fills_in_what_a_text_config_leaves_out(tmp_path: Path) -> None:
    """Leave out what the published folders of Gemma 3 leave out."""
    byte_level().save(str(tmp_path / "tokenizer.json"))
    config = {"model_type": "gemma3", "eos_token_id": [1, 106], "text_config": {"model_type": "gemma3_text"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    source = read(tmp_path)
    assert (source.vocab_size, source.max_context) == (262_208, 131_072)
    assert {1, 106} <= set(source.eos_token_ids)


@pytest.mark.parametrize("name", PUBLISHED)
def test_gateway_derives_the_engines_context(name: str) -> None:
    shape = shape_from_config(resolve_config(PUBLISHED[name]), tied=False)
    assert folder_context(PUBLISHED[name]) == shape.max_context


def test_gateway_derives_a_context_that_is_stretched_by_layer_type() -> None:
    yarn = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 1024}
    config = {"model_type": "olmo3", "rope_parameters": {"full_attention": yarn}}
    assert folder_context(config) == 8192
    assert shape_from_config(resolve_config(config), tied=False).max_context == 8192


def test_older_files_of_qwen_vl_have_the_text_fields_beside_the_encoders() -> None:
    """Take the fields of Qwen2.5-VL-3B-Instruct as they were published."""
    text = {
        "vocab_size": 151936,
        "hidden_size": 2048,
        "intermediate_size": 11008,
        "num_hidden_layers": 36,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128000,
        "rope_theta": 1000000.0,
        "rms_norm_eps": 1e-06,
        "sliding_window": 32768,
        "use_sliding_window": False,
        "eos_token_id": 151645,
        "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
    }
    outer = {"model_type": "qwen2_5_vl", "tie_word_embeddings": True, "vision_config": {"depth": 32}}
    flat = {**outer, **text, "architectures": ["Qwen2_5_VLForConditionalGeneration"]}
    nested = {**outer, "text_config": {**text, "model_type": "qwen2_5_vl_text"}}
    shapes = [shape_from_config(resolve_config(config), tied=True) for config in (flat, nested)]
    assert shapes[0] == shapes[1]
    assert shapes[0].rotations[0].axes == (0,) * 16 + (1,) * 24 + (2,) * 24
    assert shapes[0].rotations[0].theta == 1000000.0
    assert folder_context(flat) == 128000
