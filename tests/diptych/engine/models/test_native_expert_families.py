"""Families with experts on the native step equal transformers, alone and among others."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from diptych.engine.backends.native.supports import supports
from diptych.engine.loaded_model import load_model
from tests.diptych.engine.models.expert_models import (
    CONFIGS,
    all_logits,
    greedy,
    is_greedy,
    oracle_logits,
    oracle_of,
    prompts,
)

LONG = prompts()[-1] + prompts()[-2]
LATENT = {name for name in CONFIGS if name.startswith("deepseek")}


@pytest.mark.parametrize("name", sorted(set(CONFIGS) - LATENT))
def test_native_logits_and_greedy_tokens_equal_transformers(name: str, tmp_path: Path) -> None:
    oracle = oracle_of(name)
    oracle.save_pretrained(tmp_path)
    model = load_model(tmp_path, torch.float32, backend="native")
    rounded, exact = oracle_logits(oracle, LONG), oracle_logits(oracle.double(), LONG)
    oracle.float()
    # Of some of these models transformers' own fp32 is further than that from its fp64.
    bound = max(1e-4, 1.5 * float((rounded - exact).abs().max()))
    for chunk in (len(LONG), 7):
        torch.testing.assert_close(all_logits(model, LONG, chunk).double(), exact, atol=bound, rtol=0)
    together = greedy(model, prompts(), 64)
    for prompt, tokens in zip(prompts(), together, strict=True):
        assert is_greedy(oracle, prompt, tokens)
    for number in (0, 9):
        assert greedy(model, [prompts()[number]], 64) == [together[number]]


@pytest.mark.parametrize("name", sorted(LATENT))
def test_latents_are_left_to_torch(name: str, tmp_path: Path) -> None:
    oracle_of(name).save_pretrained(tmp_path)
    model = load_model(tmp_path, torch.float32)
    assert supports(model.shape) == "attention over latents"
    assert model.backend_name == "torch"
    assert model.why_torch is not None
    assert "attention over latents" in model.why_torch
