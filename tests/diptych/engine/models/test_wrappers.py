"""Text models inside models with images, against transformers: both spellings of their tensors' names."""

from __future__ import annotations

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
from diptych.engine.models.shape import UnsupportedModel
from diptych.engine.weights import BadModelFile
from diptych.engine.weights.checkpoint import read_checkpoint
from diptych.runtime.model_context import folder_context
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
from tests.diptych.engine.weights.quantised_folders import change

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
